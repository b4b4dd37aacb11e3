"""Whether requests, attempts and credits agree with one another. Run after every event in tests.

Each owner checks its own books; here are the rules that hold between them.
"""

from ..runtime.errors import InvariantBroken
from .attempts import Attempts
from .credits import Books
from .desk import Desk
from .dispatch import Dispatcher
from .request import RequestPhase


def check_agreement(desk: Desk, dispatcher: Dispatcher, attempts: Attempts, books: Books) -> None:
    """Raises InvariantBroken."""
    attempts.check()
    books.check()
    requests = desk.live()
    for request in requests:
        waiting = request in dispatcher
        attempt = attempts.get(request.attempt) if request.attempt is not None else None
        running = attempt is not None and attempt.live and attempt.request is request
        queued = request.phase is RequestPhase.QUEUED
        if waiting is not queued or running is queued:
            raise InvariantBroken(
                f"request {request.asked.request_id} is {request.phase.value}, "
                f"waiting: {waiting}, running: {running}"
            )
    if len(dispatcher) > len(requests):
        raise InvariantBroken("an ended request waits in the line")
    if not len(attempts) and books.outstanding():
        raise InvariantBroken("credits are out although no attempt lives")
