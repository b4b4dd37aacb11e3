"""Moves requests past the rows that were just submitted for them: what comes next, and when.

The Scheduler's helper, called by it alone. Reads no result but the scores it is given.
What follows a row is fixed here where it is known (positions, output indices, depths);
where a score decides, the request awaits it.
"""

from typing import assert_never

from .exit_policy import Next
from .plans import LoopRow, PrefillRow, SchedulerOutput
from .request import Chunk, Phase, Request, Role
from .request_book import RequestBook
from .types import Generation


class Progress:
    def __init__(self, book: RequestBook) -> None:
        self._book = book

    def submitted(self, plan: SchedulerOutput) -> None:
        for chunk in plan.prefill:
            self._prompt(self._request(chunk.generation), chunk)
        for coda in plan.coda:
            self._coda(self._request(coda.generation))
        for prelude in plan.prelude:
            self._book.move(self._request(prelude.generation), Phase.NEEDS_LOOP)
        for loop in plan.loops:
            request = self._request(loop.generation)
            request.loops = loop.depth + 1
            self._follow(request)

    def scored(self, request: Request, row: LoopRow, score: float) -> None:
        """A score that comes after its token has exited says nothing any more."""
        if row.position != request.position:
            return
        request.policy.feed(row.depth + 1, score)
        if request.phase is Phase.AWAITS_SCORE:
            self._follow(request)

    def _prompt(self, request: Request, row: PrefillRow) -> None:
        request.passed_over = 0
        if not row.last_loop:
            request.chunk = Chunk(row.range, row.depth + 1)
            return
        request.chunk, request.prompt_submitted = None, row.range.stop
        if row.keep_hidden:
            sends = request.role is Role.PREFILL
            self._book.move(request, Phase.AWAITS_RESULT if sends else Phase.NEEDS_CODA)

    def _coda(self, request: Request) -> None:
        if request.next_output_is_last:
            self._book.move(request, Phase.AWAITS_RESULT)
            return
        request.next_output += 1
        request.loops = 0
        request.policy.start_token(request.next_output)
        self._book.move(request, Phase.NEEDS_PRELUDE)

    def _follow(self, request: Request) -> None:
        after = request.policy.after(request.loops)
        match after:
            case Next.LOOP:
                phase = Phase.NEEDS_LOOP
            case Next.EXIT:
                phase = Phase.NEEDS_CODA
            case Next.WAIT:
                phase = Phase.AWAITS_SCORE
            case _:
                assert_never(after)
        if phase is Phase.NEEDS_CODA:
            self._book.move(request, phase)
        elif phase is not request.phase:
            request.move(phase)  # not news enough for the book: it happens in every loop

    def _request(self, generation: Generation) -> Request:
        request = self._book.get(generation)
        assert request is not None, f"generation {generation} was planned and is not live"
        return request
