"""Room for requests that grow: blocks for new columns, victims for blocks, and the way back.

The Scheduler's helper, called by it and by the intake. Whom to take blocks from is preemption.py's
choice; plans no pass.
Only a request without a pass in flight and without a peer's lease is suspended, and only one whose
snapshot was provided for when it was let in.
"""

from .errors import CapacityError, InvariantBroken
from .kv_manager import KVManager, Lease
from .preemption import Candidate, Urgency, choose_victim, resume_margin
from .request import Phase, Request, Role
from .request_book import RequestBook, Slots
from .types import EngineRequest, Generation, KVGeometry

STATE_BYTES = 4096  # of a snapshot besides blocks, hidden row and prompt chunk: more than enough
MIN_SLOTS = 2  # with one slot, received requests could hold all blocks and never get the slot


class Room:
    def __init__(
        self,
        *,
        book: RequestBook,
        kv: KVManager,
        slots: Slots,
        geometry: KVGeometry,
        incremental: bool,
        watermark: float,
        snapshot_bytes: int,
        chunk_tokens: int,
    ) -> None:
        self._book = book
        self._kv = kv
        self._slots = slots
        self._geometry = geometry
        self._incremental = incremental
        self._watermark = watermark
        self._snapshot_bytes = snapshot_bytes
        self._chunk_tokens = chunk_tokens
        self._stalled: set[Generation] = set()  # lack a column, and nobody gives way
        self._held: set[Generation] = set()  # victims whose pass is still in flight
        self._unsaved: set[Generation] = set()  # could not be suspended in this round
        self._made_room = False
        self._numbers = dict.fromkeys(
            ("preemptions", "resumes", "deferred_capacity", "deferred_hazard"), 0
        )

    def statistics(self) -> dict[str, int]:
        """deferred_capacity, deferred_hazard: rows that were ready and not planned, because no
        block was free, or because a request's state must settle first."""
        return self._numbers

    def take_made_room(self) -> bool:
        """Whether someone was suspended since the last call: others may be let in now."""
        made, self._made_room = self._made_room, False
        return made

    # Letting in.

    def first_tokens(self, spec: EngineRequest, role: Role) -> tuple[int, int]:
        """Positions to take blocks for at first, and the snapshot bytes to set aside for growing.

        Without bytes to set aside a request gets everything at once, and never asks again.
        """
        if role is Role.PREFILL:
            return spec.context_tokens, 0
        whole, first = spec.capacity_tokens, spec.context_tokens + 1
        if not self._incremental or first >= whole:
            return whole, 0
        need = self._largest_snapshot(spec)
        if self._book.funded_bytes + need > self._snapshot_bytes:
            return whole, 0
        return first, need

    def watermark_blocks(self) -> int:
        """Blocks to leave free when a request is let in beside others."""
        if not self._incremental or not self._kv.holders():
            return 0
        return int(self._watermark * self._kv.usable_blocks())

    def most_urgent_suspended(self) -> Urgency | None:
        """Of those that may come back."""
        return min((request.urgency for request in self._returning()), default=None)

    def _largest_snapshot(self, spec: EngineRequest) -> int:
        geometry = self._geometry
        blocks = geometry.blocks(spec.capacity_tokens) * geometry.block_bytes
        chunk = min(self._chunk_tokens, spec.context_tokens) * geometry.hidden_bytes
        return blocks + geometry.hidden_bytes + chunk + STATE_BYTES

    # Growing.

    def ready(self, ready: dict[Phase, list[Request]]) -> dict[Phase, list[Request]]:
        """Give rows that begin a column their blocks, most urgent first, and leave out whoever
        cannot run now. Before any row is made: victims must not be in the plan."""
        if not self._incremental:
            return ready
        self._stalled.clear()
        self._held.clear()
        self._unsaved.clear()
        loops = ready.get(Phase.NEEDS_LOOP, [])
        needy = [r for r in loops if r.position >= self._kv.granted_tokens(r.generation)]
        for request in sorted(needy, key=lambda request: request.urgency):
            if request.phase is Phase.NEEDS_LOOP:
                self._give_column(request)
        if not needy:
            return ready
        out = self._stalled | self._held
        left = {
            phase: [r for r in requests if r.phase is phase and r.generation not in out]
            for phase, requests in ready.items()
        }
        left = {phase: requests for phase, requests in left.items() if requests}
        if self._unsaved and not left:
            self._fail_one_unsaved()
        return left

    def _give_column(self, request: Request) -> None:
        if self._beyond_usable(request):
            self._step_aside(request)
        elif not self._grow(request):
            self._stalled.add(request.generation)

    def _beyond_usable(self, request: Request) -> bool:
        """While a quarantine lasts, it could not go on even if nobody else held a block."""
        tokens = min(request.position + 1, request.spec.capacity_tokens)
        columns = max(self._kv.columns(request.generation), self._geometry.plane_blocks(tokens))
        return columns * self._geometry.num_planes > self._kv.usable_blocks()

    def _step_aside(self, request: Request) -> None:
        """Nobody gives way to it in vain, and what it holds serves others."""
        if Lease.PASS in self._kv.leases(request.generation) or request.receive_slot is not None:
            self._held.add(request.generation)
            self._numbers["deferred_hazard"] += 1
            return
        self._numbers["deferred_capacity"] += 1
        self._suspend(request.generation)
        if request.generation in self._unsaved:
            self._stalled.add(request.generation)

    def _grow(self, request: Request) -> bool:
        while not self._kv.grow(request.generation, request.position + 1):
            victim = choose_victim(request.urgency, self._candidates())
            if victim is None:
                self._numbers["deferred_capacity"] += 1
                return False
            if victim.busy:
                self._held.add(victim.generation)
                self._numbers["deferred_hazard"] += 1
                return False
            self._suspend(victim.generation)
        return True

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(r.generation, r.urgency, Lease.PASS in self._kv.leases(r.generation))
            for r in self._book.executing()
            if r.funded and r.receive_slot is None and r.generation not in self._unsaved
        ]

    def _suspend(self, generation: Generation) -> None:
        request = self._book.get(generation)
        assert request is not None, f"generation {generation} was chosen and is not live"
        try:
            self._slots.suspend(generation, self._kv.allocation(generation).tables)
        except CapacityError:
            self._unsaved.add(generation)  # set aside too little: the next victim, then
            return
        self._kv.suspend(generation)
        self._book.suspend(request)
        self._made_room = True
        self._numbers["preemptions"] += 1

    def _fail_one_unsaved(self) -> None:
        """The executor kept less memory for snapshots than it had said, and nobody can run."""
        victims = [self._book.get(generation) for generation in self._unsaved]
        victim = max((v for v in victims if v is not None), key=lambda v: v.urgency)
        message = "its blocks are needed and its snapshot has no room: raise --snapshot-bytes"
        self._book.fail(victim, CapacityError.code, message)
        self._made_room = True

    def _someone_stalls(self) -> bool:
        found = (self._book.get(generation) for generation in self._stalled)
        return any(request is not None and not request.over for request in found)

    # The way back.

    def _returning(self) -> list[Request]:
        """Suspended requests, but for those that have to wait for the end of a quarantine."""
        return [r for r in self._book.suspended() if not self._beyond_usable(r)]

    def resume(self) -> None:
        """Suspended requests get blocks and a slot again, most urgent first, unless someone who
        executes lacks a column."""
        while (waiting := self._returning()) and not self._someone_stalls():
            request = min(waiting, key=lambda request: request.urgency)
            planes, generation = self._geometry.num_planes, request.generation
            margin = resume_margin(
                executing=len(self._book.executing()),
                num_planes=planes,
                watermark=self.watermark_blocks(),
            )
            need = self._kv.columns(generation) * planes + margin
            if self._slots.capacity().free_slots < 1 or need > self._kv.free_blocks():
                return
            allocation = self._kv.resume(generation)
            slot = self._slots.restore(generation, allocation.tables) if allocation else None
            if slot is None:
                raise InvariantBroken("blocks and a slot were counted as free and then were not")
            self._book.resume(request, slot)
            self._numbers["resumes"] += 1
