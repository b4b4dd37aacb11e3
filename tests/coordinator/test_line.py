"""Who is offered a start, in which order, and how often somebody may be passed."""

import itertools
from collections.abc import Collection

from rlt.coordinator.line import Verdict, WaitingLine
from rlt.coordinator.request import Request
from rlt.coordinator.timeline import Timeline
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import RequestId

_names = itertools.count()


def request(priority: int = 0) -> Request:
    return Request(
        client=b"c",
        asked=GenerateRequest(
            request_id=RequestId(str(next(_names))), prompt_token_ids=(1,), priority=priority
        ),
        prompt=(1,),
        seed=0,
        received_s=0.0,
        deadline_s=1.0,
        text=None,
        timeline=Timeline(),
    )


def offered(
    line: WaitingLine, *, start: Collection[Request] = (), absent: Collection[Request] = ()
) -> list[Request]:
    asked: list[Request] = []

    def answer(one: Request) -> Verdict:
        asked.append(one)
        if one in absent:
            return Verdict.ABSENT
        return Verdict.STARTED if one in start else Verdict.BLOCKED

    line.offer(answer)
    return asked


def test_a_lower_number_goes_first_and_equal_ones_keep_their_order() -> None:
    line = WaitingLine(10, 8)
    late, first, second, urgent = (request(p) for p in (5, 1, 1, -3))
    places = [line.add(one) for one in (late, first, second, urgent)]
    assert places == [True, False, False, False]
    assert offered(line) == [urgent, first, second, late]


def test_a_refused_request_goes_back_to_the_front_of_its_own_priority() -> None:
    line = WaitingLine(10, 8)
    urgent, older, back = request(0), request(1), request(1)
    line.add(urgent)
    line.add(older)
    line.put_back(back)
    assert offered(line) == [urgent, back, older]


def test_a_blocked_request_is_passed_a_bounded_number_of_times() -> None:
    line = WaitingLine(10, 2)
    large, small = request(), [request() for _ in range(3)]
    for one in (large, *small):
        line.add(one)
    offered(line, start=small)
    assert large.bypassed == 2 and small[2] in line


def test_a_request_that_nobody_here_could_take_is_passed_by_all_others_and_keeps_its_place() -> (
    None
):
    line = WaitingLine(10, 2)
    alone, others = request(), [request() for _ in range(4)]
    for one in (alone, *others[:3]):
        line.add(one)
    offered(line, start=others, absent=[alone])
    line.add(others[3])
    line.offer(lambda _: Verdict.STARTED, others[3])  # the one before need not be asked again
    assert list(line) == [alone] and not alone.bypassed
    assert offered(line, start=[alone]) == [alone] and not len(line)
