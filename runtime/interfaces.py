"""The Protocols between the layers: Executor, both connector halves, frontend, clock.

The runtime defines them; connector/ and coordinator/ implement their side. Facts cross as frozen
records; nobody reads another's private fields.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from .plans import FinishedRange, ModelRunnerOutput, SchedulerOutput, SendOrder, TransferFeedback
from .types import (
    BlockTables,
    ExitParams,
    FinishReason,
    Generation,
    KVGeometry,
    ModelDescription,
    RequestId,
    SamplingParams,
    Stamp,
    TokenLogprobs,
)


class Clock(Protocol):
    def now_s(self) -> float: ...  # monotonic, for deadlines
    def wall_s(self) -> float: ...  # wall clock, for stamps


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    geometry: KVGeometry
    model: ModelDescription
    device: str


class AdmissionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request, and all of them together, may take of this engine."""

    num_blocks: int
    num_slots: int  # rows that may execute at once
    num_receive_slots: int  # landing places for incoming hidden states
    max_positions: int
    snapshot_bytes: int = 0  # what suspended requests may keep, all together
    grows: bool = False  # requests begin with less than they may come to need


class Capacity(msgspec.Struct, frozen=True):
    """A snapshot; `epoch` moves whenever slots or snapshot bytes are released, so that a blocked
    caller can wait.

    unsettled: suspends that have yet to read their blocks, restores and truncates that have yet to
    write to theirs. A plan may name such blocks at once; a peer's WRITE may not, so a reservation
    waits while there are any.
    """

    epoch: int
    free_slots: int
    free_receive_slots: int
    unsettled: int = 0


class SuspendReceipt(msgspec.Struct, frozen=True):
    """What a suspend freed and what it keeps."""

    generation: Generation
    slot: int
    num_blocks: int
    snapshot_bytes: int


class BlockWatch(Protocol):
    """A debugging aid that watches free memory. hits: how often somebody had written there."""

    hits: int

    def freed(self, blocks: Sequence[int]) -> None:
        """Nobody may write them any more. Called before any of them can be granted again."""
        ...

    def granted(self, blocks: Sequence[int]) -> None:
        """Called before their new owner, or a peer, hears of them."""
        ...

    def sweep(self) -> None:
        """Look at some of the free blocks. Bounded work; call it now and then."""
        ...


class Executor(Protocol):
    """The one entry to the device side. Computes on a thread of its own; every call here returns
    at once except prepare, warm_up, synchronize and shutdown."""

    def capabilities(self) -> Capabilities: ...
    def admission_limits(self) -> AdmissionLimits: ...
    def capacity(self) -> Capacity: ...
    def block_watch(self) -> BlockWatch | None:
        """What is to be told of every block that becomes free or is granted, if anything."""
        ...

    def admit(self, generation: Generation) -> int | None:
        """An execution slot (a row of hidden[]), or None when all are taken. Idempotent."""
        ...

    def admit_receive(self, generation: Generation) -> int | None:
        """A receive slot, numbered after the execution slots in the same hidden[]. Idempotent."""
        ...

    def end_receive(self, generation: Generation) -> None:
        """Give the receive slot back; without effect if there is none."""
        ...

    def cancel_admission(self, generation: Generation) -> None:
        """Undo admit for a request that never ran."""
        ...

    def release(self, generation: Generation) -> None:
        """The request was aborted: give its slots and chunk state back. No pass of it may be in
        flight."""
        ...

    def complete(self, generation: Generation) -> None:
        """The request finished: give its slots back."""
        ...

    def export_hidden(self, generation: Generation) -> int:
        """The row of hidden[] that holds the last prompt token's state, for the worker connector.
        Held until complete or release."""
        ...

    def submit(self, plan: SchedulerOutput) -> None:
        """Passes, suspends and restores take effect in the order of these calls, so blocks freed by
        a suspend may be named by the very next plan."""
        ...

    def suspend(self, generation: Generation, tables: BlockTables) -> SuspendReceipt:
        """Save what these blocks, the slot's hidden row and device token hold, and give the slot
        back. The request's passes must all have been collected. Raises CapacityError when the
        snapshot bound is reached; then nothing has changed."""
        ...

    def restore(self, generation: Generation, tables: BlockTables) -> int | None:
        """Write a snapshot into other blocks and another slot; that slot, or None if none is
        free."""
        ...

    def discard(self, generation: Generation) -> None:
        """Drop a snapshot that will not be restored; without effect if there is none."""
        ...

    def truncate(self, generation: Generation, tokens: int, tables: BlockTables) -> None:
        """Drop K/V of positions >= tokens (rollback of speculative decoding): afterwards they hold
        nothing that a later read could mistake for valid."""
        ...

    def collect(self) -> list[ModelRunnerOutput]:
        """Passes finished since the last call, in submission order. Never blocks."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Block until a pass is ready to collect; False on timeout. For in-process callers."""
        ...

    def wait_capacity(self, epoch: int, timeout_s: float) -> bool:
        """Block until slots or snapshot room were released after `epoch`; False on timeout."""
        ...

    def set_event_sink(self, sink: Callable[[], None] | None) -> None:
        """Called from the compute thread after each pass; must be quick and thread-safe."""
        ...

    def memory_breakdown(self) -> dict[str, int]: ...  # bytes by purpose
    def prepare(self) -> None: ...
    def warm_up(self) -> None: ...
    def synchronize(self) -> None: ...
    def shutdown(self) -> None: ...


class ReceiveComplete(msgspec.Struct, frozen=True):
    """Everything the reservation asked for is in: positions valid, request may be activated."""

    generation: Generation


class ReceiveEnded(msgspec.Struct, frozen=True):
    """A receive that will not complete can be written no more: blocks may be reused."""

    generation: Generation


class SendEnded(msgspec.Struct, frozen=True):
    """Acknowledged (or stopped) and every handle terminal: P's blocks may be reused.

    error: why it did not succeed, or None.
    """

    generation: Generation
    error: str | None


class Quarantined(msgspec.Struct, frozen=True):
    """Nothing proves yet that the writer has ended: the request ends, its blocks and its receive
    slot are withdrawn until QuarantineEnded."""

    generation: Generation


class QuarantineEnded(msgspec.Struct, frozen=True):
    """The proof came after all, or the writer was fenced: what was withdrawn may be reused."""

    generation: Generation


HandoffEvent = ReceiveComplete | ReceiveEnded | SendEnded | Quarantined | QuarantineEnded


class SchedulerConnector(Protocol):
    """Scheduler-side half of a connector: pure handoff state, no tensor, no socket, no NIXL."""

    def on_prefill_admitted(
        self, generation: Generation, tables: BlockTables, hidden_slot: int
    ) -> None:
        """P took every block of the prompt and a slot: these are the sources of its WRITEs."""
        ...

    def on_ranges_finished(self, ranges: Sequence[FinishedRange]) -> None: ...
    def on_feedback(self, feedback: TransferFeedback) -> None: ...
    def take_orders(self) -> list[SendOrder]: ...
    def take_events(self) -> list[HandoffEvent]: ...


class WorkerConnector(Protocol):
    """Worker-side half: registrations, NIXL handles, bytes in flight, notifications."""

    def post(self, orders: Sequence[SendOrder]) -> None: ...
    def poll(self) -> TransferFeedback: ...
    def outstanding(self) -> bool:
        """Whether poll() has anything to wait for: queued or posted WRITEs."""
        ...

    def close(self) -> None: ...


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one request's output, in order. The last one carries finish_reason.

    error_code and error are set exactly when finish_reason is ERROR. timeline and num_prompt_tokens
    come with the last delta.
    """

    request_id: RequestId
    start_index: int
    token_ids: tuple[int, ...] = ()
    exit_depths: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    error_code: str | None = None
    error: str | None = None
    num_prompt_tokens: int | None = None
    timeline: tuple[Stamp, ...] = ()


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user asks. Exactly one of text, messages, prompt_token_ids is given.

    stop: strings that end the output; neither they nor what follows is part of its text, though the
    token that completes one is the output's last. priority: lower goes first. deadline_s: seconds
    from acceptance after which the request fails (None: the service's default).
    """

    request_id: RequestId
    text: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = SamplingParams()
    exit: ExitParams = ExitParams()
    stop: tuple[str, ...] = ()
    priority: int = 0
    deadline_s: float | None = None


class Frontend(Protocol):
    """What a user holds: a local engine and the service's client both are one."""

    def submit(self, request: GenerateRequest) -> None: ...
    def cancel(self, request_id: RequestId) -> None: ...
    def active(self) -> tuple[RequestId, ...]: ...
    def outputs(self, timeout_s: float | None = None) -> list[Delta]:
        """Deltas of any request, in order per request; waits until there is one or time is up."""
        ...

    def statistics(self) -> dict[str, object]: ...
    def shutdown(self) -> None: ...
