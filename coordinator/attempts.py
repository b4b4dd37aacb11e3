"""Every live attempt: its phases, its credits, and the order in which its legs are let go.

Owns attempts from their first Reserve until both workers have let go. Decides nothing about
requests: what an attempt meets is reported to its owner. A leg is settled exactly once.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from ..connector.messages import OutputRow
from ..runtime.errors import InvariantBroken
from ..runtime.events import Reservation
from ..runtime.types import EngineRequest, Generation
from .attempt import Attempt, Leg, Phase
from .attempt_asks import CANCEL, AskKind, OpenAsks
from .credits import Books
from .effects import Effect
from .request import Request
from .router import Need, Pair

RESERVES_AT_ONE = 5  # so often a worker may say "not now" before others are looked at
RESENDS_AFTER_RELEASE = 3  # D has let go although output is missing: so often it is asked again


class AttemptOwner(Protocol):
    """Hears what becomes of attempts. Called once per ending of a live attempt."""

    def attempt_failed(self, attempt: Attempt, code: str, error: str) -> None: ...
    def attempt_refused(self, attempt: Attempt, leg: Leg, code: str, reason: str) -> None: ...
    def attempt_must_wait(self, attempt: Attempt) -> None: ...
    def attempt_output(self, attempt: Attempt, row: OutputRow) -> None: ...


class Attempts:
    def __init__(self, owner: AttemptOwner, books: Books, emit: Callable[[Effect], None]) -> None:
        self._owner = owner
        self._books = books
        self._live: dict[Generation, Attempt] = {}
        self._at: dict[str, dict[Generation, Attempt]] = {}  # by worker, legs not yet settled
        self._asks = OpenAsks(emit)

    def start(
        self, request: Request, engine_request: EngineRequest, pair: Pair, need: Need, mono_s: float
    ) -> Attempt:
        """Take credits of both workers and ask D to reserve."""
        generation = engine_request.generation
        attempt = Attempt(
            generation=generation,
            request=request,
            engine_request=engine_request,
            prefill=Leg("prefill", pair.prefill),
            decode=Leg("decode", pair.decode, asked=True),
        )
        self._live[generation] = attempt
        decode = need.of_decode(self._books.account(pair.decode))
        for leg, credit in ((attempt.prefill, need.prefill), (attempt.decode, decode)):
            self._books.take(leg.worker, generation, credit)
            self._at.setdefault(leg.worker, {})[generation] = attempt
        self._asks.ask(AskKind.RESERVE, attempt, mono_s)
        return attempt

    def reserved(self, attempt: Attempt, reservation: Reservation, mono_s: float) -> None:
        """D has promised its blocks: P may start."""
        self._asks.answered(AskKind.RESERVE, attempt)
        attempt.move(Phase.STARTING)
        attempt.must_wait = False
        attempt.prefill.asked = True
        attempt.reservation = reservation
        self._asks.ask(AskKind.PREFILL, attempt, mono_s)

    def prefill_accepted(self, attempt: Attempt) -> None:
        self._asks.answered(AskKind.PREFILL, attempt)
        attempt.move(Phase.RUNNING)

    def computed(self, attempt: Attempt) -> None:
        """P's compute credit returns; its blocks stay until it lets go."""
        attempt.computed = True
        credit = self._books.credit(attempt.prefill.worker, attempt.generation)
        keep = msgspec.structs.replace(credit, compute_tokens=0)
        self._books.shrink(attempt.prefill.worker, attempt.generation, keep)

    def activated(self, attempt: Attempt) -> None:
        """D's receive slot returns; its blocks stay until it lets go."""
        attempt.activated = attempt.received = True
        credit = self._books.credit(attempt.decode.worker, attempt.generation)
        keep = msgspec.structs.replace(credit, receive_slots=0)
        self._books.shrink(attempt.decode.worker, attempt.generation, keep)

    def ask_resend(self, attempt: Attempt, mono_s: float) -> None:
        self._asks.ask(AskKind.RESEND, attempt, mono_s)

    def gap_closed(self, attempt: Attempt) -> None:
        """A D that has let go is asked until its last output is here: nothing else tells of it."""
        if not attempt.decode.released:
            self._asks.answered(AskKind.RESEND, attempt)

    def finish(self, attempt: Attempt) -> None:
        """The whole output arrived: nothing more is asked, the legs let go by themselves."""
        attempt.move(Phase.FINISHED)
        self._asks.drop(attempt)
        if attempt.writer_never_started:
            raise InvariantBroken(f"generation {attempt.generation} finished without a prefill")
        for leg in attempt.legs:
            leg.known = True  # there is no output without both, even if an answer was lost
        self._forget_if_over(attempt)

    def cancel(self, attempt: Attempt, mono_s: float) -> None:
        """Ask each leg that has not let go to do so. Without effect unless the attempt is live."""
        if not attempt.live:
            return
        attempt.move(Phase.CANCELLING)
        self._asks.drop(attempt)
        for leg in attempt.legs:
            if not leg.asked:
                self._settle(attempt, leg)
            elif not leg.released:
                self._asks.ask(CANCEL[leg.role], attempt, mono_s)
        self._forget_if_over(attempt)

    def leg_released(self, attempt: Attempt, leg: Leg, mono_s: float) -> None:
        """The worker holds nothing any more (it said so, or no longer lists the generation)."""
        if leg.released:
            return
        self._settle(attempt, leg)
        if leg.role == "prefill":
            attempt.prefill_let_go_s = mono_s
        if attempt.live:
            self._released_early(attempt, leg, mono_s)
        self._forget_if_over(attempt)
        if leg.role == "decode":
            self._wake_waiting(leg.worker)

    def _released_early(self, attempt: Attempt, leg: Leg, mono_s: float) -> None:
        if leg.role == "decode" and attempt.received:
            self.ask_resend(attempt, mono_s)  # its last output may have been lost on the way
        elif leg.role == "decode" or not (attempt.computed or attempt.received):
            reason = f"the {leg.role} worker dropped the request without giving a reason"
            self._owner.attempt_failed(attempt, "worker_lost", reason)

    def leg_lost(self, attempt: Attempt, leg: Leg, error: str, version: int) -> None:
        """The worker is gone for good, as peers from `version` on say. A request whose prompt D
        holds does not need P any more; whether it does, D will tell."""
        self._settle(attempt, leg)
        if not attempt.live:
            pass
        elif leg.role == "decode" or attempt.writer_never_started:
            self._owner.attempt_failed(attempt, "worker_lost", error)
        elif not attempt.received:
            self._asks.answered(AskKind.PREFILL, attempt)
            attempt.prefill_lost, attempt.lost_version = error, version
        self._forget_if_over(attempt)

    def refused(self, attempt: Attempt, leg: Leg, code: str, reason: str) -> None:
        """The worker holds nothing of this generation and never will."""
        self._settle(attempt, leg)
        if attempt.live:
            self._owner.attempt_refused(attempt, leg, code, reason)
        self._forget_if_over(attempt)

    def repeat(self, mono_s: float) -> None:
        """Ask again what has not been answered in time."""
        for kind, attempt, tries in self._asks.due(mono_s):
            if not self._asks.is_open(kind, attempt):  # one before it has ended the attempt
                continue
            given_up = attempt.decode.released and tries > RESENDS_AFTER_RELEASE
            if kind is AskKind.RESEND and given_up:
                error = "the decode worker let go before all of its output had arrived"
                self._owner.attempt_failed(attempt, "worker_lost", error)
                continue
            self._asks.send(kind, attempt)
            if kind is AskKind.RESERVE and attempt.must_wait and tries >= RESERVES_AT_ONE:
                self._owner.attempt_must_wait(attempt)

    def _wake_waiting(self, worker: str) -> None:
        for attempt in list(self._at.get(worker, {}).values()):
            if attempt.must_wait and attempt.phase is Phase.RESERVING:
                self._asks.send(AskKind.RESERVE, attempt)

    def _settle(self, attempt: Attempt, leg: Leg) -> None:
        if leg.released:
            return
        leg.released = True
        self._books.give_back(leg.worker, attempt.generation)
        self._at[leg.worker].pop(attempt.generation)
        self._asks.answered(CANCEL[leg.role], attempt)

    def _forget_if_over(self, attempt: Attempt) -> None:
        if not attempt.live and all(leg.released for leg in attempt.legs):
            self._asks.drop(attempt)
            self._live.pop(attempt.generation, None)

    def get(self, generation: Generation) -> Attempt | None:
        return self._live.get(generation)

    def all(self) -> tuple[Attempt, ...]:
        """Oldest first."""
        return tuple(self._live.values())

    def at(self, worker: str) -> tuple[Attempt, ...]:
        """Attempts with a leg at this worker that has not let go."""
        return tuple(self._at.get(worker, {}).values())

    def forget_worker(self, worker: str) -> None:
        if self._at.pop(worker, None):
            raise InvariantBroken(f"{worker} is forgotten while attempts have legs there")

    def oldest(self) -> Generation | None:
        return next(iter(self._live), None)  # numbers only rise

    @property
    def repeats(self) -> int:
        return self._asks.repeats

    def __len__(self) -> int:
        return len(self._live)

    def check(self) -> None:
        """Every leg that has not let go is listed at its worker once, and no ask is orphaned."""
        listed = {(w, g) for w, attempts in self._at.items() for g in attempts}
        held = {
            (leg.worker, a.generation)
            for a in self._live.values()
            for leg in a.legs
            if not leg.released
        }
        if listed != held:
            raise InvariantBroken(f"legs listed and legs held differ: {listed ^ held}")
        self._asks.check(self._live)
