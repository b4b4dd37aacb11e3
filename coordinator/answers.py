"""The answers to one connection's submissions, for those that are sent again.

Owns the last of them, and up to which submission the older ones are forgotten. A client's numbers
rise, so what is not above that was answered before, and is never taken for something new. Pure.
"""

from ..connector.messages import Accepted, Rejected

REMEMBERED_ANSWERS = 1024

Answer = Accepted | Rejected


class Answers:
    def __init__(self) -> None:
        self._known: dict[int, Answer] = {}  # oldest first
        self._forgotten: int | None = None  # the highest of those that were pushed out

    def add(self, answer: Answer) -> None:
        self._known[answer.submission] = answer
        if len(self._known) > REMEMBERED_ANSWERS:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._forgotten = max(oldest, self._forgotten or oldest)

    def again(self, submission: int) -> Answer | None:
        """None if this submission is new. Whoever repeats one that is forgotten has not heard how
        it was answered, so that it may count as accepted: it ends with what became of it."""
        known = self._known.get(submission)
        if known is None and self._forgotten is not None and submission <= self._forgotten:
            return Accepted(submission=submission)
        return known
