"""Who takes part: worker incarnations, what they serve, which pairs can transfer.

Owns membership and its version. The first worker fixes the model and the KV geometry; who serves
another one is refused by name. An incarnation that was removed never comes back.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ..connector.geometry import shape_differences
from ..connector.messages import (
    PROTOCOL_VERSION,
    DrainTo,
    LiveGeneration,
    Peer,
    Peers,
    Register,
    WorkerStatistics,
)
from ..runtime.interfaces import AdmissionLimits
from ..runtime.types import KVGeometry, ModelDescription
from .attempt import Role
from .registration import registration_fault
from .remembered import Remembered
from .router import Pair

MAX_REMOVED = 16384
MAX_EARLY = 4096


def _unnamed(model: ModelDescription) -> ModelDescription:
    """A name is often a path, which may differ from machine to machine."""
    return msgspec.structs.replace(model, name="")


@dataclass(eq=False, kw_only=True)
class Worker:
    name: str
    incarnation: str
    role: Role
    pid: int
    endpoint: str
    limits: AdmissionLimits
    heard_s: float
    epoch: int  # that it was welcomed with
    unreachable_since_s: float | None = None
    draining_since_s: float | None = None
    drain: DrainTo | None = None  # what it comes to then
    told_to_end: bool = False  # for good
    live: tuple[LiveGeneration, ...] = ()
    statistics: dict[str, float] = field(default_factory=dict)


class Registry:
    def __init__(self) -> None:
        self.model: ModelDescription | None = None
        self.geometry: KVGeometry | None = None
        self.version = 0  # moves with every change of membership
        self._workers: dict[str, Worker] = {}
        self._pairs: dict[Pair, None] = {}
        self._refused: dict[Pair, str] = {}  # pairs that will never be ready, and why
        self._removed = Remembered(MAX_REMOVED)
        self._draining: set[str] = set()
        self._early: dict[Pair, str | None] = {}  # what P said before D came: why refused, or ready
        self.changes = 0  # moves with every change of membership or of the ready pairs

    def refusal(self, incarnation: str, message: Register) -> str | None:
        """Why this worker cannot take part, or None."""
        if message.incarnation != incarnation:
            return f"registers as {message.incarnation} on the connection of {incarnation}"
        if incarnation in self._removed:
            return "this incarnation was expelled: start a new one"
        if message.protocol_version != PROTOCOL_VERSION:
            return (
                f"speaks protocol {message.protocol_version}, this service {PROTOCOL_VERSION}: "
                "install the same rlt version everywhere"
            )
        if message.role not in ("prefill", "decode"):
            return f"role {message.role!r} is neither prefill nor decode"
        if message.role == "decode" and not message.peer_endpoint:
            return "a decode worker must name its peer_endpoint"
        if (fault := registration_fault(message)) is not None:
            return fault
        if self.model is not None and message.model.fingerprint != self.model.fingerprint:
            return (
                f"serves {message.model.name} ({message.model.fingerprint}), this service "
                f"{self.model.name} ({self.model.fingerprint}): give all workers one checkpoint"
            )
        if self.model is not None and _unnamed(message.model) != _unnamed(self.model):
            return f"describes the model as {message.model}, this service as {self.model}"
        if self.geometry is not None and message.pool.geometry != self.geometry:
            differences = shape_differences(self.geometry, message.pool.geometry)
            return f"its KV geometry is not this service's: {differences}"
        return None

    def add(self, message: Register, mono_s: float, epoch: int) -> Worker:
        if self.model is None:
            self.model, self.geometry = message.model, message.pool.geometry
        worker = Worker(
            name=message.worker,
            incarnation=message.incarnation,
            role="prefill" if message.role == "prefill" else "decode",
            pid=message.pid,
            endpoint=message.peer_endpoint,
            limits=message.limits,
            heard_s=mono_s,
            epoch=epoch,
        )
        self._workers[worker.incarnation] = worker
        self.version += 1
        self.changes += 1
        for pair in [pair for pair in self._early if pair.decode == worker.incarnation]:
            refused = self._early.pop(pair)
            if refused is None:
                self.pair_ready(pair.prefill, pair.decode)
            else:
                self.pair_refused(pair.prefill, pair.decode, refused)
        return worker

    def drain(self, worker: Worker, mono_s: float) -> None:
        """Nothing new goes there from now on."""
        worker.draining_since_s = mono_s
        self._draining.add(worker.incarnation)
        self.changes += 1

    def remove(self, incarnation: str) -> None:
        del self._workers[incarnation]
        self._draining.discard(incarnation)
        self.bar(incarnation)
        for pairs in (self._pairs, self._refused, self._early):
            for pair in [p for p in pairs if incarnation in (p.prefill, p.decode)]:
                del pairs[pair]
        self.version += 1
        self.changes += 1

    def bar(self, incarnation: str) -> None:
        """It counts as gone, and may not come back."""
        self._removed.add(incarnation)

    def is_barred(self, incarnation: str) -> bool:
        return incarnation in self._removed

    def pair_ready(self, prefill: str, decode: str) -> bool:
        """True if this opened a pair. A pair of workers that are not both here is no pair."""
        pair = Pair(prefill, decode)
        if self._is_early(pair, None) or not self._can_pair(pair) or pair in self._pairs:
            return False
        self._pairs[pair] = None
        self._refused.pop(pair, None)
        self.changes += 1
        return True

    def pair_closed(self, prefill: str, decode: str) -> bool:
        pair = Pair(prefill, decode)
        self._early.pop(pair, None)
        if pair not in self._pairs:
            return False
        del self._pairs[pair]
        self.changes += 1
        return True

    def pair_refused(self, prefill: str, decode: str, reason: str) -> bool:
        """True if this is news. The two do not match, and never will."""
        pair = Pair(prefill, decode)
        self.pair_closed(prefill, decode)
        if self._is_early(pair, reason) or not self._can_pair(pair) or pair in self._refused:
            return False
        self._refused[pair] = reason
        return True

    def _is_early(self, pair: Pair, refused: str | None) -> bool:
        """After a restart of the coordinator, the decode worker may yet come: keep the word."""
        if self.get(pair.decode) is not None or self.is_barred(pair.decode):
            return False
        if len(self._early) < MAX_EARLY:
            self._early[pair] = refused
        return True

    def _can_pair(self, pair: Pair) -> bool:
        roles = [w.role if w else None for w in map(self.get, (pair.prefill, pair.decode))]
        return roles == ["prefill", "decode"]

    def undecided_pairs(self) -> int:
        """Pairs of the workers that are here which are neither ready nor refused."""
        possible = len(self.incarnations("prefill")) * len(self.incarnations("decode"))
        return possible - len(self._pairs) - len(self._refused)

    def unpairable(self) -> str | None:
        """Why not one pair of the workers that are here will ever be ready, if that is so."""
        if self._pairs or self.undecided_pairs() or not self._refused:
            return None
        return next(iter(self._refused.values()))

    def get(self, incarnation: str) -> Worker | None:
        return self._workers.get(incarnation)

    def named(self, name: str) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.name == name]

    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    def incarnations(self, role: Role) -> tuple[str, ...]:
        return tuple(w.incarnation for w in self._workers.values() if w.role == role)

    def pairs(self) -> tuple[Pair, ...]:
        return tuple(self._pairs)

    def open_pairs(self) -> tuple[Pair, ...]:
        """Those that may be given something new."""
        if not self._draining:
            return tuple(self._pairs)
        return tuple(p for p in self._pairs if self._draining.isdisjoint((p.prefill, p.decode)))

    def paired_with(self, incarnation: str) -> tuple[str, ...]:
        """Names of the workers to which this one has a ready pair."""
        pairs = [p for p in self._pairs if incarnation in (p.prefill, p.decode)]
        others = [p.decode if p.prefill == incarnation else p.prefill for p in pairs]
        return tuple(sorted(self._workers[other].name for other in others))

    def all_drain(self, role: Role) -> bool:
        """Workers of that role are here, and none that takes anything new."""
        since = [w.draining_since_s for w in self._workers.values() if w.role == role]
        return bool(since) and None not in since

    def pool_tokens(self) -> int | None:
        """Positions that one request may take of the roomiest decode worker; None without one."""
        if self.geometry is None:
            return None
        planes, block = self.geometry.num_planes, self.geometry.block_size
        return max(
            (
                min(w.limits.num_blocks // planes * block, w.limits.max_positions)
                for w in self._workers.values()
                if w.role == "decode"
            ),
            default=None,
        )

    def peers_for(self, worker: Worker) -> Peers:
        others = (other for other in self._workers.values() if other.role != worker.role)
        return Peers(
            version=self.version,
            peers=tuple(
                Peer(
                    worker=other.name,
                    incarnation=other.incarnation,
                    role=other.role,
                    endpoint=other.endpoint,
                )
                for other in others
            ),
        )

    def statistics(self, more: Callable[[str], dict[str, float]]) -> tuple[WorkerStatistics, ...]:
        """Each worker's last heartbeat, and what `more` adds about its incarnation."""
        return tuple(
            WorkerStatistics(
                worker=worker.name,
                incarnation=worker.incarnation,
                role=worker.role,
                pid=worker.pid,
                live=len(worker.live),
                values={**worker.statistics, **more(worker.incarnation)},
                draining=worker.draining_since_s is not None,
                pairs=self.paired_with(worker.incarnation),
            )
            for worker in self._workers.values()
        )
