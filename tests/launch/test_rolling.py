"""Drains and rolling restarts, against a service that does what the test says at each look."""

from collections.abc import Callable

import pytest

from rlt.connector.messages import DrainAnswer
from rlt.launch.rolling import POLL_S, Operator
from rlt.launch.service_view import draw_status, view_of
from rlt.runtime.errors import ServiceError, ServiceUnreachable

Row = dict[str, object]


def row(worker: str, start: int, *pairs: str, draining: bool = False, live: int = 0) -> Row:
    return {
        "worker": worker,
        "incarnation": f"{worker}-{start}",
        "role": worker.partition("-")[0],
        "pid": 100 + start,
        "live": live,
        "values": {"blocks_total": 256.0, "blocks_free": 250.0, "blocks_quarantined": 2.0},
        "draining": draining,
        "pairs": pairs,
    }


P = row("prefill-0", 1, "decode-0")
D = row("decode-0", 1, "prefill-0")
LEAVING = row("decode-0", 1, draining=True, live=3)
ALONE = row("prefill-0", 1)


class Scripted:
    """Every look at it shows the next scene; the last one stays. Sleeping is what time takes."""

    def __init__(self, *scenes: list[Row] | Exception) -> None:
        self.scenes = list(scenes)
        self.asked: list[tuple[str, bool]] = []
        self.said: list[str] = []
        self.now_s = 0.0
        self.error: str | None = None

    def stats(self) -> dict[str, object]:
        scene = self.scenes.pop(0) if len(self.scenes) > 1 else self.scenes[0]
        if isinstance(scene, Exception):
            raise scene
        return {"ready_pairs": 1.0, "retries": 2.0, "workers": scene}

    def drain(self, worker: str, restart: bool = False) -> DrainAnswer:
        self.asked.append((worker, restart))
        return DrainAnswer(worker=worker, incarnation=f"{worker}-1", error=self.error)

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s

    def operator(self) -> Operator:
        return Operator(
            self,
            timeout_s=5.0,
            say=self.said.append,
            now_s=lambda: self.now_s,
            sleep=self.sleep,
        )


def test_a_drain_is_asked_for_once_and_not_waited_for() -> None:
    service = Scripted([P, D])
    service.operator().drain("decode-0", wait=False)
    assert (service.asked, service.now_s) == ([("decode-0", False)], 0.0)


def test_a_drain_is_waited_for_until_the_incarnation_is_gone() -> None:
    service = Scripted([P, LEAVING], [P, LEAVING], [ALONE])
    service.operator().drain("decode-0", wait=True)
    assert service.said[-1] == "decode-0 has ended"
    assert service.now_s == pytest.approx(2 * POLL_S)


def test_a_drain_that_the_service_refuses_says_why() -> None:
    service = Scripted([P, D])
    service.error = "no worker is called decode-7"
    with pytest.raises(ServiceError, match="decode-7"):
        service.operator().drain("decode-7", wait=True)


def test_a_drain_that_takes_too_long_says_what_is_left() -> None:
    service = Scripted([P, LEAVING])
    with pytest.raises(TimeoutError, match="after 5 s decode-0 still has 3 live requests"):
        service.operator().drain("decode-0", wait=True)


BACK = row("decode-0", 2, "prefill-0")
NOT_YET: list[tuple[list[Row], str]] = [
    ([P, LEAVING], "still has 3 live requests"),
    ([ALONE], "no new one has come"),
    ([ALONE, row("decode-0", 2)], "no ready pair with prefill-0"),
]


@pytest.mark.parametrize(("scene", "complaint"), NOT_YET)
def test_a_restart_is_done_only_when_the_new_one_has_its_pairs(
    scene: list[Row], complaint: str
) -> None:
    service = Scripted([P, D], scene, scene, [P, BACK])
    service.operator().restart(["decode-0"], wait=True)
    assert service.said[-1] == "decode-0 is back"
    assert service.now_s == pytest.approx(2 * POLL_S)
    stuck = Scripted([P, D], scene)
    with pytest.raises(TimeoutError, match=complaint):
        stuck.operator().restart(["decode-0"], wait=True)


def test_a_restart_waits_for_the_pairs_it_had_and_not_for_those_that_never_were() -> None:
    odd = row("prefill-9", 1)
    service = Scripted([P, D, odd], [P, BACK, odd])
    service.operator().restart(["decode-0"], wait=True)
    assert service.now_s == 0.0


def test_a_restart_of_all_takes_one_only_when_the_one_before_is_back() -> None:
    back = row("prefill-0", 2, "decode-0")
    service = Scripted(
        [P, D], [row("prefill-0", 1, draining=True), D], [D], [back, D], [back, D], [back, BACK]
    )
    seen: list[int] = []
    ask = service.drain

    def drain(worker: str, restart: bool = False) -> DrainAnswer:
        seen.append(len(service.scenes))
        return ask(worker, restart)

    service.drain = drain  # type: ignore[method-assign]
    service.operator().restart(["prefill-0", "decode-0"], wait=True)
    assert service.asked == [("prefill-0", True), ("decode-0", True)]
    assert seen == [5, 1]
    assert service.said[-1] == "decode-0 is back"


def test_a_coordinator_that_is_started_again_meanwhile_is_asked_again() -> None:
    service = Scripted(
        [P, D], ServiceUnreachable("nobody answers"), [P, D], [P, LEAVING], [P, BACK]
    )
    service.operator().restart(["decode-0"], wait=True)
    assert service.asked == [("decode-0", True)] * 2


@pytest.mark.parametrize("call", [lambda o: o.drain("decode-0", wait=True), lambda o: o.view()])
def test_a_service_that_never_answers_is_no_endless_wait(call: Callable[[Operator], None]) -> None:
    service = Scripted(ServiceUnreachable("nobody answers"))
    with pytest.raises((TimeoutError, ServiceUnreachable), match="nobody answers"):
        call(service.operator())


def test_the_table_shows_each_worker_with_its_blocks_and_its_pairs() -> None:
    view = view_of(Scripted([LEAVING, P]).stats())
    head, names, prefill, decode = draw_status("ipc:///x", view)
    assert head.startswith("ipc:///x: ready pairs 1, queued 0, live requests 0, retries 2")
    assert names.split() == "WORKER ROLE PID INCARNATION LIVE FREE QUARANTINED STATE PAIRS".split()
    assert (
        prefill.split() == "prefill-0 prefill 101 prefill-0-1 0 250/256 2 serving decode-0".split()
    )
    assert decode.split() == "decode-0 decode 101 decode-0-1 3 250/256 2 draining -".split()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e300])
def test_a_workers_nonsense_is_shown_and_breaks_nothing(value: float) -> None:
    odd = {**P, "values": {"blocks_free": value, "blocks_quarantined": value}}
    assert len(draw_status("x", view_of(Scripted([odd]).stats()))) == 3


def test_a_service_without_workers_says_so() -> None:
    assert draw_status("x", view_of(Scripted([]).stats()))[1:] == ["no worker has joined"]
