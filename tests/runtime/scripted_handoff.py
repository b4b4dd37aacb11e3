"""Both halves of a connector for tests: WRITEs that the test delivers, and events that it scripts.

`Pair` joins a prefill and a decode engine; nothing moves between them until the test says so.
"""

from collections.abc import Callable, Sequence

import msgspec

from rlt.runtime.config import SchedulerConfig
from rlt.runtime.engine_core import EngineCore
from rlt.runtime.events import EngineEvent, Refuse, Reservation, Wait
from rlt.runtime.interfaces import (
    HandoffEvent,
    Quarantined,
    QuarantineEnded,
    ReceiveComplete,
    ReceiveEnded,
    SendEnded,
)
from rlt.runtime.plans import FinishedRange, SendOrder, TransferFeedback
from rlt.runtime.types import BlockTables, EngineRequest, Generation, TokenRange

from .simulated_executor import Clock, SimulatedExecutor, copy_range


class ScriptedSchedulerConnector:
    def __init__(self, block_size: int = 2) -> None:
        self.block_size = block_size
        self.sources: dict[Generation, tuple[BlockTables, int]] = {}
        self.targets: dict[Generation, Reservation] = {}
        self.stopped: set[Generation] = set()
        self.ranges: list[FinishedRange] = []
        self.feedback: list[TransferFeedback] = []
        self.orders: list[SendOrder] = []
        self.events: list[HandoffEvent] = []

    def on_prefill_admitted(
        self, generation: Generation, tables: BlockTables, hidden_slot: int
    ) -> None:
        assert generation not in self.sources, "admitted twice"
        self.sources[generation] = (tables, hidden_slot)

    def on_ranges_finished(self, ranges: Sequence[FinishedRange]) -> None:
        for finished in ranges:
            assert finished.generation in self.sources, "finished before it was admitted"
            self.ranges.append(finished)
            if finished.generation in self.targets and finished.generation not in self.stopped:
                if lacked := self._lacked(finished):
                    self.orders.append(self._order(lacked, finished.depth))
                if finished.hidden_ready:
                    self.orders.append(self._order(finished, None))

    def _lacked(self, finished: FinishedRange) -> FinishedRange | None:
        """What D did not have already."""
        start = max(finished.range.start, self.targets[finished.generation].cached_tokens)
        if start >= finished.range.stop:
            return None
        return msgspec.structs.replace(finished, range=TokenRange(start, finished.range.stop))

    def _order(self, finished: FinishedRange, depth: int | None) -> SendOrder:
        tables, slot = self.sources[finished.generation]
        target = self.targets[finished.generation]
        return SendOrder(
            generation=finished.generation,
            peer="d",
            sequence=0,
            depth=depth,
            range=finished.range,
            blocks=() if depth is None else tables[depth],
            peer_blocks=() if depth is None else target.tables[depth],
            hidden_slot=slot,
            peer_hidden_slot=target.hidden_slot,
        )

    def on_feedback(self, feedback: TransferFeedback) -> None:
        self.feedback.append(feedback)

    def take_orders(self) -> list[SendOrder]:
        orders, self.orders = self.orders, []
        return orders

    def take_events(self) -> list[HandoffEvent]:
        events, self.events = self.events, []
        return events


class ScriptedWorkerConnector:
    def __init__(self) -> None:
        self.posted: list[SendOrder] = []
        self.before_post: Callable[[], None] = lambda: None

    def post(self, orders: Sequence[SendOrder]) -> None:
        self.before_post()
        self.posted += orders

    def poll(self) -> TransferFeedback:
        return TransferFeedback()

    def outstanding(self) -> bool:
        return bool(self.posted)

    def close(self) -> None: ...


class Side:
    """One engine with its executor and its scripted connector."""

    def __init__(
        self,
        executor: SimulatedExecutor,
        chunk_tokens: int = 4,
        config: SchedulerConfig | None = None,
    ) -> None:
        self.executor = executor
        self.block_size = executor.capabilities().geometry.block_size
        self.connector = ScriptedSchedulerConnector(self.block_size)
        self.transfers = ScriptedWorkerConnector()
        self.events: list[EngineEvent] = []
        self.core = EngineCore(
            executor,
            config or SchedulerConfig(chunk_tokens=chunk_tokens),
            clock=Clock(),
            scheduler_connector=self.connector,
            worker_connector=self.transfers,
        )

    def step(self, *handoff: HandoffEvent) -> list[EngineEvent]:
        self.connector.events += handoff
        events = self.core.step()
        self.core.check()
        self.events += events
        return events


class Pair:
    def __init__(self, prefill: Side, decode: Side) -> None:
        self.prefill, self.decode = prefill, decode
        self._arrived: dict[Generation, int] = {}  # positions over all planes, and the hidden state
        self._prompts: dict[Generation, int] = {}

    def start(self, request: EngineRequest) -> Reservation | Wait | Refuse:
        answer = self.decode.core.reserve(request)
        if isinstance(answer, Reservation):
            self._prompts[request.generation] = request.context_tokens - answer.cached_tokens
            self.prefill.connector.targets[request.generation] = answer
            self.prefill.core.add_prefill(request)
        return answer

    def deliver(self, index: int = 0) -> None:
        """One posted WRITE lands; the last one of a prompt completes it on both sides."""
        posted = self.prefill.transfers.posted
        if not posted:
            return
        order = posted.pop(index % len(posted))
        source, target = self.prefill.executor, self.decode.executor
        if order.depth is None:
            hidden = source.memory.hidden[order.hidden_slot]
            target.memory.hidden[order.peer_hidden_slot] = hidden
            size = 1
        else:
            size = len(order.range)
            copy_range(
                source, target, order.blocks, order.peer_blocks, order.range, self.decode.block_size
            )
        arrived = self._arrived.get(order.generation, 0) + size
        self._arrived[order.generation] = arrived
        planes = source.capabilities().geometry.num_planes
        if arrived == self._prompts[order.generation] * planes + 1:
            self.decode.connector.events.append(ReceiveComplete(order.generation))
            self.prefill.connector.events.append(SendEnded(order.generation, None))

    def cancel(self, generation: Generation) -> None:
        self.prefill.core.cancel(generation)
        self.decode.core.cancel(generation)

    def stop_writer(self, generation: Generation, *, proof: bool) -> None:
        """P posts and writes no more; without proof of that, D withdraws the memory."""
        self.prefill.connector.stopped.add(generation)
        posted = self.prefill.transfers.posted
        posted[:] = [order for order in posted if order.generation != generation]
        orders = self.prefill.connector.orders
        orders[:] = [order for order in orders if order.generation != generation]
        self.prefill.connector.events.append(SendEnded(generation, None))
        ending = ReceiveEnded(generation) if proof else Quarantined(generation)
        self.decode.connector.events.append(ending)

    def prove(self, generation: Generation) -> None:
        """What was withdrawn turns out to be written no more."""
        self.decode.connector.events.append(QuarantineEnded(generation))

    def settle(self, limit: int = 3000) -> None:
        """Run and deliver until both sides are idle."""
        for _ in range(limit):
            self.prefill.step()
            self.deliver()
            self.decode.step()
            if self.prefill.core.idle() and self.decode.core.idle():
                return
        raise AssertionError(f"live: {self.prefill.core.live()} {self.decode.core.live()}")
