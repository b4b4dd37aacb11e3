"""Every message that crosses a process boundary, and one union per direction.

Frozen, tagged, keyword-only; the decoder refuses unknown fields, unknown tags and wrong types.
After admission every message names its generation; a client's request ID never reaches a worker.
Every ask is repeated until it is answered, so handling any message twice must be harmless.
"""

from typing import Literal

import msgspec

from ..runtime.events import Reservation
from ..runtime.interfaces import AdmissionLimits, Delta, GenerateRequest
from ..runtime.types import (
    EngineRequest,
    FinishReason,
    Generation,
    ModelDescription,
    RequestId,
    Stamp,
    TokenLogprobs,
    TokenRange,
)
from .geometry import PoolDescription

PROTOCOL_VERSION = 3

DrainTo = Literal["end", "restart"]  # what a drained worker comes to


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages."""


# Client -> coordinator


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of a connection. Answered by ServiceInfo."""

    protocol_version: int = PROTOCOL_VERSION


class Generate(Message, frozen=True, kw_only=True, tag="generate"):
    """Ask for a generation. `submission` is new for every call on one connection; sending the same
    one again changes nothing. Answered by Accepted or Rejected."""

    submission: int
    request: GenerateRequest


class CancelRequest(Message, frozen=True, kw_only=True, tag="cancel_request"):
    """Answered by CancelDone, after which no output of this request is sent."""

    request_id: RequestId


class AskStatistics(Message, frozen=True, kw_only=True, tag="ask_statistics"):
    """Answered by Statistics with the same tag."""

    ask: int


class DrainWorker(Message, frozen=True, kw_only=True, tag="drain_worker"):
    """Let this worker finish what it has, give it nothing new, then end it; restart: its supervisor
    starts it again. Answered by DrainAnswer. How far it is shows in Statistics. ask: the client's
    own number of this ask; asked again with it, the same answer, and nothing else happens. 0: none.
    """

    worker: str
    restart: bool = False
    ask: int = 0


ClientToCoordinator = Hello | Generate | CancelRequest | AskStatistics | DrainWorker


# Coordinator -> client


class ServiceInfo(Message, frozen=True, kw_only=True, tag="service_info"):
    """ready: at least one pair can serve. instance: new at each start of the coordinator; a client
    that hears another one knows that its requests are lost."""

    protocol_version: int
    model: str
    ready: bool
    instance: str = ""


class DrainAnswer(Message, frozen=True, kw_only=True, tag="drain_answer"):
    """error: why it is not done (no such worker), or None."""

    worker: str
    incarnation: str = ""
    error: str | None = None
    ask: int = 0


class Accepted(Message, frozen=True, kw_only=True, tag="accepted"):
    submission: int


class Rejected(Message, frozen=True, kw_only=True, tag="rejected"):
    """The request was not taken (a live one with the same ID, if any, goes on)."""

    submission: int
    request_id: RequestId
    code: str
    error: str


class Deltas(Message, frozen=True, kw_only=True, tag="deltas"):
    """New output of any of the connection's requests, in order per request."""

    deltas: tuple[Delta, ...]


class CancelDone(Message, frozen=True, kw_only=True, tag="cancel_done"):
    request_id: RequestId


class Statistics(Message, frozen=True, kw_only=True, tag="statistics"):
    """values: coordinator counters; workers: each worker's last heartbeat."""

    ask: int
    values: dict[str, float]
    workers: tuple["WorkerStatistics", ...]


class WorkerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """pairs: names of the workers with which it has a ready pair."""

    worker: str
    incarnation: str
    role: str
    pid: int
    live: int
    values: dict[str, float]
    draining: bool = False
    pairs: tuple[str, ...] = ()


class Alive(Message, frozen=True, kw_only=True, tag="alive"):
    """Sent every second to connections with live requests: each side learns of the other's
    death."""


CoordinatorToClient = (
    ServiceInfo | Accepted | Rejected | Deltas | CancelDone | Statistics | Alive | DrainAnswer
)


# Worker -> coordinator


class Register(Message, frozen=True, kw_only=True, tag="register", omit_defaults=True):
    """First message of an incarnation. Answered by Welcome or RegisterRefused.

    peer_endpoint: where this decode worker listens for prefill workers; empty at a prefill worker.
    highest_epoch: the highest coordinator epoch it ever saw, so that a new one exceeds it; 0 if it
    never was welcome anywhere, so that no other worker can know it. drain: what another coordinator
    was draining it to; this one goes on with it. Defaults are left out, so that a coordinator of an
    older version can read it, and refuse it by name.
    """

    worker: str
    incarnation: str
    role: str  # "prefill" | "decode"
    pid: int
    protocol_version: int
    model: ModelDescription
    pool: PoolDescription
    limits: AdmissionLimits
    peer_endpoint: str
    highest_epoch: int = 0
    live: tuple[Generation, ...] = ()
    drain: DrainTo | None = None


class LiveGeneration(msgspec.Struct, frozen=True, array_like=True):
    generation: Generation
    phase: str
    outputs: int = 0  # tokens produced so far (decode)


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent on the same ordered connection as everything else, so that what it lists is complete:
    a generation that the coordinator knows as answered and that is missing here has been released.

    draining: it wants to end (SIGTERM, or too much of it is quarantined): no new requests, and a
    Shutdown once it holds none. quarantined_from: incarnations whose writes it still fears. pairs:
    decode incarnations with which a prefill worker has an open pair, all of them; None at a decode
    worker. So a PairReady or PairClosed that is lost costs one heartbeat.
    """

    peers_version: int
    live: tuple[LiveGeneration, ...]
    statistics: dict[str, float]
    draining: bool = False
    quarantined_from: tuple[str, ...] = ()
    pairs: tuple[str, ...] | None = None


class PairReady(Message, frozen=True, kw_only=True, tag="pair_ready"):
    """A prefill worker and this decode incarnation have exchanged pools and can transfer."""

    decode: str


class PairClosed(Message, frozen=True, kw_only=True, tag="pair_closed"):
    """The pair cannot transfer (any more). refused: their pools or models do not match."""

    decode: str
    reason: str
    refused: bool = False


class Reserved(Message, frozen=True, kw_only=True, tag="reserved"):
    generation: Generation
    reservation: Reservation
    stamps: tuple[Stamp, ...] = ()


class MustWait(Message, frozen=True, kw_only=True, tag="must_wait"):
    generation: Generation
    reason: str


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """Answer to Reserve or Prefill: this worker will never take this generation."""

    generation: Generation
    code: str
    reason: str


class PrefillAccepted(Message, frozen=True, kw_only=True, tag="prefill_accepted"):
    generation: Generation


class PrefillComplete(Message, frozen=True, kw_only=True, tag="prefill_complete"):
    """Compute is done (the compute credit returns); blocks stay until Released."""

    generation: Generation
    stamps: tuple[Stamp, ...]


class RequestReceived(Message, frozen=True, kw_only=True, tag="received"):
    """D holds the whole prompt. What it does not prove: that D runs it, or that P let go."""

    generation: Generation
    stamps: tuple[Stamp, ...]


class RequestActivated(Message, frozen=True, kw_only=True, tag="activated"):
    generation: Generation
    stamps: tuple[Stamp, ...]
    prefill_tokens: int
    recurrent_loops: int


class OutputRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    generation: Generation
    start_index: int
    token_ids: tuple[int, ...]
    exit_depths: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


class Output(Message, frozen=True, kw_only=True, tag="output"):
    """One frame per step for all rows. D keeps tokens until Confirm; Resend asks again on a gap."""

    rows: tuple[OutputRow, ...]


class GenerationFailed(Message, frozen=True, kw_only=True, tag="failed"):
    """The generation ends with this error; GenerationReleased follows."""

    generation: Generation
    code: str
    error: str


class GenerationReleased(Message, frozen=True, kw_only=True, tag="released"):
    """Everything this worker held is back (or quarantined and counted). Also answers Cancel."""

    generation: Generation
    stamps: tuple[Stamp, ...] = ()
    quarantined_blocks: int = 0


WorkerToCoordinator = (
    Register
    | Heartbeat
    | PairReady
    | PairClosed
    | Reserved
    | MustWait
    | Refused
    | PrefillAccepted
    | PrefillComplete
    | RequestReceived
    | RequestActivated
    | Output
    | GenerationFailed
    | GenerationReleased
)


# Supervisor -> coordinator (same socket as the workers)


class Supervised(msgspec.Struct, frozen=True, array_like=True):
    """One child of a supervisor: the process runs, or has ended and is not reaped yet."""

    worker: str
    incarnation: str
    pid: int


class Supervise(Message, frozen=True, kw_only=True, tag="supervise"):
    """Every worker process of this supervisor, once a second. Answered by SuperviseAnswer."""

    children: tuple[Supervised, ...]


class WorkerExited(Message, frozen=True, kw_only=True, tag="worker_exited"):
    """That worker process is dead and reaped: it writes nothing any more. Told when it happens, and
    as the answer to each Expel of an incarnation that this supervisor once had."""

    worker: str
    incarnation: str
    pid: int
    status: int


SupervisorToCoordinator = Supervise | WorkerExited


# Coordinator -> supervisor


class Expel(Message, frozen=True, kw_only=True, tag="expel"):
    """Kill this incarnation, also if it is stopped, and reap it. Answered by WorkerExited, repeated
    until then; who never had it says nothing."""

    incarnation: str


class SuperviseAnswer(Message, frozen=True, kw_only=True, tag="supervise_answer"):
    """The coordinator lives. pid: its process, by which its own supervisor knows who answers."""

    pid: int


CoordinatorToSupervisor = Expel | SuperviseAnswer


# Coordinator -> worker


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    epoch: int
    heartbeat_s: float


class RegisterAgain(Message, frozen=True, kw_only=True, tag="register_again"):
    """Answer to whoever is not known here and was not expelled: this coordinator is new. The worker
    drops every generation that an older one gave it, as Welcome's epoch tells, and keeps its
    pairs."""


class RegisterRefused(Message, frozen=True, kw_only=True, tag="register_refused"):
    reason: str


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    incarnation: str
    role: str
    endpoint: str


class Peers(Message, frozen=True, kw_only=True, tag="peers"):
    """Every live worker of the other role. Who is missing is gone."""

    version: int
    peers: tuple[Peer, ...]


class HeartbeatAnswer(Message, frozen=True, kw_only=True, tag="heartbeat_answer"):
    """The coordinator lives. oldest_live: generations below it are closed for good. dead: of the
    heartbeat's quarantined_from, those whose process is known to be reaped."""

    oldest_live: Generation
    dead: tuple[str, ...] = ()


def _check_generation(generation: Generation, request: EngineRequest) -> None:
    """A frame that contradicts itself is malformed: two owners would know it by two numbers."""
    if request.generation != generation:
        raise ValueError(f"generation {generation} with a request of {request.generation}")


class Reserve(Message, frozen=True, kw_only=True, tag="reserve"):
    """Answered by Reserved, MustWait or Refused; the same generation gets the same blocks."""

    generation: Generation
    request: EngineRequest
    prefill: str  # incarnation of the prefill worker that will write

    def __post_init__(self) -> None:
        _check_generation(self.generation, self.request)


class Prefill(Message, frozen=True, kw_only=True, tag="prefill"):
    """Answered by PrefillAccepted or Refused."""

    generation: Generation
    request: EngineRequest
    decode: str  # incarnation of the decode worker
    reservation: Reservation

    def __post_init__(self) -> None:
        _check_generation(self.generation, self.request)


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    """Answered by GenerationReleased. writer_never_started: Prefill was never sent to any worker,
    so nobody can write into the reservation."""

    generation: Generation
    writer_never_started: bool = False


class ConfirmRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    generation: Generation
    outputs: int  # tokens 0..outputs-1 arrived, and the finish reason if they were all


class Confirm(Message, frozen=True, kw_only=True, tag="confirm"):
    rows: tuple[ConfirmRow, ...]


class Resend(Message, frozen=True, kw_only=True, tag="resend"):
    generation: Generation
    start_index: int


class Drain(Message, frozen=True, kw_only=True, tag="drain"):
    """This worker is being drained. Asks nothing of it but to say so when it registers with another
    coordinator."""

    to: DrainTo


class Shutdown(Message, frozen=True, kw_only=True, tag="shutdown"):
    """Stop now: everything live is dropped. The coordinator drains before it sends this.

    restart: end with EXIT_RESTART, so that the supervisor starts a new incarnation at once.
    """

    restart: bool = False


CoordinatorToWorker = (
    Welcome
    | RegisterAgain
    | RegisterRefused
    | Peers
    | HeartbeatAnswer
    | Reserve
    | Prefill
    | Cancel
    | Confirm
    | Resend
    | Drain
    | Shutdown
)


# Prefill -> decode


class PairHello(Message, frozen=True, kw_only=True, tag="pair_hello"):
    """Open a pair. Answered by PairWelcome or PairRefused."""

    worker: str
    incarnation: str
    protocol_version: int
    fingerprint: str
    pool: PoolDescription
    agent_metadata: bytes


class Chunk(Message, frozen=True, kw_only=True, tag="chunk"):
    """The WRITE of one chunk was posted. Says nothing about its arrival. depth None: the hidden
    state."""

    generation: Generation
    sequence: int
    depth: int | None
    range: TokenRange


class ChunkSpec(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    depth: int | None
    range: TokenRange


class Commit(Message, frozen=True, kw_only=True, tag="commit"):
    """All of `chunks` have been posted, and nothing else will be. Says nothing about arrival.

    stamps: P's part of the timeline, which D passes on.
    """

    generation: Generation
    allocation: int
    chunks: tuple[ChunkSpec, ...]
    stamps: tuple[Stamp, ...] = ()


class WriterEnded(Message, frozen=True, kw_only=True, tag="writer_ended"):
    """Sequences 0..posted-1 were posted, all their handles are terminal, no more will follow."""

    generation: Generation
    posted: int


PrefillToDecode = PairHello | Chunk | Commit | WriterEnded


# Decode -> prefill


class PairWelcome(Message, frozen=True, kw_only=True, tag="pair_welcome"):
    incarnation: str
    pool: PoolDescription
    agent_metadata: bytes


class PairRefused(Message, frozen=True, kw_only=True, tag="pair_refused"):
    incarnation: str
    reason: str


class Ack(Message, frozen=True, kw_only=True, tag="ack"):
    """D has received everything. Answers Commit."""

    generation: Generation


class Stop(Message, frozen=True, kw_only=True, tag="stop"):
    """Post nothing more for this generation. Answered by WriterEnded."""

    generation: Generation


DecodeToPrefill = PairWelcome | PairRefused | Ack | Stop
