"""From waiting to running: resolves requests, offers them pairs in order, starts their attempts.

Owns the line of waiting requests and since when no pair has been ready. A request is offered again
only after something has changed that could let it start.
"""

import logging
import math
from collections.abc import Callable
from typing import assert_never

import msgspec

from ..runtime.errors import Overloaded, RequestError, error_from
from ..runtime.events import Refuse, Wait
from ..runtime.types import EngineRequest, Generation
from ..runtime.validate import resolve_request
from .attempt import ROLES
from .attempts import Attempts
from .credits import Books
from .generations import Generations
from .line import Verdict, WaitingLine
from .now import Now
from .observer import Observer
from .registry import Registry
from .request import Request, RequestPhase
from .router import Choice, NoPair, Pair, choose_pair, need_of

logger = logging.getLogger(__name__)

MAX_TRANSIENT_REFUSALS = 5
# Not a verdict on the request: a new generation, or another pair, may well be taken.
TRANSIENT = ("closed", "pair_closed")


class Dispatcher:
    def __init__(
        self,
        *,
        registry: Registry,
        books: Books,
        attempts: Attempts,
        generations: Generations,
        line: WaitingLine,
        fail: Callable[[Request, str, str], None],
        pair_wait_s: float | None,
        now: Now,
        observer: Observer,
    ) -> None:
        self._registry = registry
        self._books = books
        self._attempts = attempts
        self._generations = generations
        self._line = line
        self._fail = fail
        self._pair_wait_s = math.inf if pair_wait_s is None else pair_wait_s
        self._now = now
        self._observer = observer
        self._pairless_since_s: float | None = now.mono_s
        self._offered_at: tuple[int, int] | None = None  # changes seen at the last offer
        self._first_new: Request | None = None  # came since the last offer
        self._moved_up = False  # somebody left the line, also during the last offer

    def add(self, request: Request) -> None:
        """Into the line; raises a RequestError if it is full or the request can never start."""
        if self._line.full:
            raise Overloaded(f"{len(self._line)} requests are waiting already: try later")
        self._resolve(request)
        choice = self._choose(request, request.resolved)
        if isinstance(choice, Refuse):
            raise error_from(choice.code, choice.reason)
        if self._line.add(request):
            self._first_new = self._first_new or request
        else:
            self._offered_at = None  # it passed some: offer everything anew

    def put_back(self, request: Request, worker: str, code: str, reason: str) -> None:
        """Its pair refused it. It goes on with the others, if there are any."""
        request.refusals += 1
        if code not in TRANSIENT or request.refusals > MAX_TRANSIENT_REFUSALS:
            request.refused_by[worker] = (code, reason)
        self.again(request)

    def again(self, request: Request) -> None:
        """Its attempt is over. It goes on from what was delivered, with whichever pair takes it."""
        request.attempt = None
        request.move(RequestPhase.QUEUED)
        request.resolved = self._going_on(request)
        for names in (request.failed_at, request.refused_by):  # who is gone needs no mention
            for name in [name for name in names if self._registry.get(name) is None]:
                del names[name]
        self._line.put_back(request)
        self._offered_at = None  # offer everything anew

    def never(self, request: Request) -> str | None:
        """Why no worker that is here could ever go on with it, if that is so."""
        choice = self._choose(request, self._going_on(request))
        return choice.reason if isinstance(choice, Refuse) else None

    def _going_on(self, request: Request) -> EngineRequest | None:
        if request.resolved is None or not request.delivered:
            return request.resolved
        return msgspec.structs.replace(
            request.resolved,
            delivered=tuple(request.tokens),
            delivered_depths=tuple(request.exit_depths),
        )

    def remove(self, request: Request) -> None:
        if request in self._line:
            self._moved_up = True
        self._line.remove(request)

    def run(self, now: Now) -> None:
        """Start what can start, if anything changed since the last time."""
        self._now = now
        if self._registry.open_pairs():
            self._pairless_since_s = None
        elif self._pairless_since_s is None:
            self._pairless_since_s = now.mono_s
        changes = (self._registry.changes, self._books.changes)
        moved_up, self._moved_up = self._moved_up, False
        if moved_up or changes != self._offered_at:
            self._line.offer(self._start)
        elif self._first_new is not None:
            self._line.offer(self._start, self._first_new)
        self._offered_at, self._first_new = changes, None

    def _start(self, request: Request) -> Verdict:
        try:
            self._resolve(request)
        except RequestError as error:  # the first worker came after the request
            self._fail(request, error.code, str(error))
            return Verdict.ENDED
        choice = self._choose(request, request.resolved)
        match choice:
            case Pair():
                self._begin(request, choice)
                return Verdict.STARTED
            case Refuse(code=code, reason=reason):
                if request.last_failure is not None:
                    code, failure = request.last_failure
                    reason = f"{failure}; it cannot go on elsewhere: {reason}"
                self._fail(request, code, reason)
                return Verdict.ENDED
            case Wait():
                return Verdict.BLOCKED
            case NoPair():
                return Verdict.ABSENT
            case _:
                assert_never(choice)

    def _begin(self, request: Request, pair: Pair) -> None:
        assert request.resolved is not None and self._registry.geometry is not None
        generation = self._generations.next()
        engine_request = msgspec.structs.replace(request.resolved, generation=generation)
        request.move(RequestPhase.RUNNING)
        request.attempt = generation
        request.attempts += 1
        request.timeline.mark("admitted", self._now.wall_s)
        self._observer.started(request, self._now)
        name = request.asked.request_id
        logger.debug(
            "request %s is generation %d: %s -> %s", name, generation, pair.prefill, pair.decode
        )
        need = need_of(engine_request, self._registry.geometry)
        self._attempts.start(request, engine_request, pair, need, self._now.mono_s)

    def _resolve(self, request: Request) -> None:
        """Check the request against the model, as soon as a worker has told which one it is."""
        if request.resolved is None and self._registry.model is not None:
            request.resolved = resolve_request(
                request.asked,
                request.prompt,
                generation=Generation(0),
                seed=request.seed,
                model=self._registry.model,
                pool_tokens=self._registry.pool_tokens(),
            )

    def _choose(self, request: Request, asked: EngineRequest | None) -> Choice:
        geometry = self._registry.geometry
        if asked is None or geometry is None:
            return NoPair("no_prefill_worker", "no worker has registered yet")
        choice = choose_pair(
            need_of(asked, geometry),
            self._registry.open_pairs(),
            self._registry.incarnations("prefill"),
            self._registry.incarnations("decode"),
            self._books,
            request.refused_by,
            request.failed_at,
        )
        if isinstance(choice, NoPair):
            for role in ROLES:
                if self._registry.all_drain(role):
                    return NoPair(f"no_{role}_worker", f"every {role} worker is being drained")
        return choice

    def deadline_error(self, request: Request) -> tuple[str, str]:
        """What to call it that the request's time is up."""
        if request.phase is RequestPhase.QUEUED:
            choice = self._choose(request, request.resolved)
            if isinstance(choice, NoPair):
                return choice.code, f"{choice.reason}, until the request's deadline"
            return "deadline_exceeded", "the deadline passed while the request waited for room"
        return "deadline_exceeded", f"the deadline passed after {request.delivered} output tokens"

    def pairless(self, now: Now) -> list[tuple[Request, NoPair]]:
        """Requests that have waited pair_wait_s without any ready pair."""
        if self._pairless_since_s is None or math.isinf(self._pair_wait_s):
            return []
        late = []
        for request in self._line:
            since_s = max(request.received_s, self._pairless_since_s)
            if now.mono_s - since_s >= self._pair_wait_s:
                choice = self._choose(request, request.resolved)
                if isinstance(choice, NoPair):
                    late.append((request, choice))
        return late

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, request: object) -> bool:
        return request in self._line
