"""How the service stands at one moment, as plain records: what the page and the metrics show.

Reads the owners' books and changes nothing. Names workers by name, requests by the caller's ID; of
what was asked and answered it tells lengths and depths only, never the words.
"""

from collections import Counter
from enum import StrEnum

import msgspec

from .attempt import Attempt, Phase
from .attempts import Attempts
from .desk import Desk
from .history import Ended, History, mean_depth
from .now import Now
from .registry import Registry, Worker
from .request import Request

REQUESTS_SHOWN = 200  # the oldest; the counts tell of all
DEPTHS_SHOWN = 32  # the last of each request


class Stage(StrEnum):
    """Where a handoff is: the attempt's phase, and how far both legs have come in it."""

    RESERVING = "reserving"
    STARTING = "starting"
    COMPUTING = "computing"  # P computes, and what is done is on its way
    TRANSFERRING = "transferring"  # all is computed, not all has arrived
    RECEIVED = "received"  # D waits for a free slot
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLING = "cancelling"


def stage_of(attempt: Attempt) -> Stage:
    if attempt.phase is not Phase.RUNNING:
        return Stage(attempt.phase.value)
    if attempt.activated or attempt.request.delivered:
        return Stage.DECODING
    if attempt.received:
        return Stage.RECEIVED
    return Stage.TRANSFERRING if attempt.computed else Stage.COMPUTING


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """values: its last heartbeat's figures. reachable: its connection is open. draining: it is to
    end, and gets nothing new."""

    name: str
    role: str
    pid: int
    heard_ago_s: float
    reachable: bool
    draining: bool
    live: int
    num_blocks: int
    num_slots: int
    num_receive_slots: int
    values: dict[str, float]


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    request_id: str
    stage: str  # "queued", or the handoff's
    prefill: str
    decode: str
    prompt_tokens: int
    max_tokens: int
    outputs: int
    attempts: int
    exit_depths: tuple[int, ...]
    mean_depth: float | None
    age_s: float


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """handoffs: live attempts by stage; they outlive their requests. num_loops: 0 while no worker
    has told. block_bytes: of one KV block."""

    model: str
    num_loops: int
    block_bytes: int
    counters: dict[str, float]
    handoffs: dict[Stage, int]
    workers: tuple[WorkerView, ...]
    pairs: tuple[tuple[str, str], ...]
    num_requests: int
    requests: tuple[RequestView, ...]
    ended: tuple[Ended, ...]


def take_snapshot(
    *,
    counters: dict[str, float],
    registry: Registry,
    attempts: Attempts,
    desk: Desk,
    history: History,
    now: Now,
) -> Snapshot:
    stages = Counter(stage_of(attempt) for attempt in attempts.all())
    live = sorted(desk.live(), key=lambda request: request.number)
    names = {worker.incarnation: worker.name for worker in registry.workers()}
    model, geometry = registry.model, registry.geometry
    return Snapshot(
        model=model.name if model is not None else "",
        num_loops=model.num_loops if model is not None else 0,
        block_bytes=geometry.block_bytes if geometry is not None else 0,
        counters=counters,
        handoffs={stage: stages[stage] for stage in Stage},
        workers=tuple(_worker(worker, now) for worker in registry.workers()),
        pairs=tuple((names[pair.prefill], names[pair.decode]) for pair in registry.pairs()),
        num_requests=len(live),
        requests=tuple(
            _request(request, attempts, names, now) for request in live[:REQUESTS_SHOWN]
        ),
        ended=history.latest(),
    )


def _worker(worker: Worker, now: Now) -> WorkerView:
    return WorkerView(
        name=worker.name,
        role=worker.role,
        pid=worker.pid,
        heard_ago_s=now.mono_s - worker.heard_s,
        reachable=worker.unreachable_since_s is None,
        draining=worker.draining_since_s is not None,
        live=len(worker.live),
        num_blocks=worker.limits.num_blocks,
        num_slots=worker.limits.num_slots,
        num_receive_slots=worker.limits.num_receive_slots,
        values=worker.statistics,
    )


def _request(request: Request, attempts: Attempts, names: dict[str, str], now: Now) -> RequestView:
    attempt = attempts.get(request.attempt) if request.attempt is not None else None
    return RequestView(
        number=request.number,
        request_id=request.asked.request_id,
        stage=stage_of(attempt) if attempt is not None else "queued",
        prefill=names.get(attempt.prefill.worker, "") if attempt is not None else "",
        decode=names.get(attempt.decode.worker, "") if attempt is not None else "",
        prompt_tokens=len(request.prompt),
        max_tokens=request.asked.sampling.max_tokens,
        outputs=request.delivered,
        attempts=request.attempts,
        exit_depths=tuple(request.exit_depths[-DEPTHS_SHOWN:]),
        mean_depth=mean_depth(request),
        age_s=now.mono_s - request.received_s,
    )
