"""Runs one cell: stage, fault, and everything that must hold afterwards.

Owns what is asked and what is checked. The service stays as it is for the next cell: every worker
back, nothing held, nothing ordered.
"""

import time
from collections.abc import Callable, Sequence

import msgspec

from rlt.coordinator.client import Client
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import ExitParams, RequestId, SamplingParams

from ..system.namespaces import Network
from ..system.service import START_S, eventually
from .asked import Answer, Asked
from .faults import Faults
from .matrix import RIGHT, Cell, Result
from .matrix_stage import Beats, Scene, TooSoon

DEADLINE_S = 120.0  # of requests that are to be answered
DEADLINES_S = (1.5, 4.0, 10.0)  # of those that are not: a slow machine needs longer to the stage
LATE_S = 2.0  # how long after its deadline a client may hear of it
CANCELLED_S = 5.0
REST_S = 40.0


def _request(name: str, prompt: int, sampling: SamplingParams, exit: ExitParams) -> GenerateRequest:
    tokens = tuple(3 + (7 * i + len(name) * 11) % 500 for i in range(prompt))
    return GenerateRequest(
        request_id=RequestId(name), prompt_token_ids=tokens, sampling=sampling, exit=exit
    )


GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, temperature=0.8, top_k=50, seed=7, ignore_eos=True)
STRUCK = (
    _request("greedy", 40, GREEDY, ExitParams(exit_threshold=0.5, min_loops=1)),
    _request("seeded", 24, SEEDED, ExitParams(exit_threshold=0.7, min_loops=1, max_loops=3)),
)
MEANWHILE = _request("meanwhile", 33, GREEDY, ExitParams(exit_threshold=0.5, min_loops=2))
REQUESTS = (*STRUCK, MEANWHILE)


class Run:
    """expected: what a local engine answers. network: of a service whose links can be cut."""

    def __init__(
        self,
        cell: Cell,
        faults: Faults,
        client: Client,
        expected: dict[str, Answer],
        network: Network | None,
    ) -> None:
        self.cell, self.faults, self.client = cell, faults, client
        self.expected, self.network = expected, network
        prefill, decode = cell.setting.team
        self.workers = [f"prefill-{n}" for n in range(prefill)]
        self.workers += [f"decode-{n}" for n in range(decode)]
        self.quarantined = self.canary_hits = 0
        self.beats = Beats()
        self.victim = ""
        self.struck_s = 0.0

    def result(self) -> Result:
        self.faults.relay.add(self.beats)
        try:
            return self._result()
        finally:
            self.faults.relay.forget(self.beats)

    def _result(self) -> Result:
        before = {name: self.faults.incarnation(name) for name in self.workers}
        coordinator = self.faults.process("coordinator").pid
        replays = self._replays()
        scene = self._bring()
        try:
            self.struck_s = time.monotonic()
            meanwhile = self._strike(scene)
            self._until(lambda: scene.over, DEADLINE_S, "they end")
            released_s = self._released(before)
        finally:
            scene.close()
        replays = self._replays() - (0 if self.victim == "coordinator" else replays)
        self._check_ends(scene, replays)
        self._check_right(meanwhile)
        self._check_survivors(before, coordinator)
        self._check_later()
        assert self.canary_hits == 0
        prefill, decode = self.cell.setting.team
        return Result(
            fault=self.cell.fault,
            stage=self.cell.stage,
            transport=self.cell.setting.transport,
            team=f"{prefill}P{decode}D",
            end=self.cell.end,
            retries=max(asked.retries for asked in scene.asked),
            replays=replays,
            ended_s=max((asked.ended_s or 0.0) - self.struck_s for asked in scene.asked),
            released_s=released_s,
            quarantined=self.quarantined,
        )

    # The stage

    def _bring(self) -> Scene:
        if self.cell.fault != "deadline":
            return self._staged(DEADLINE_S)
        for deadline_s in DEADLINES_S[:-1]:
            try:
                return self._staged(deadline_s)
            except TooSoon:
                self.faults.note(f"{deadline_s} s is too short to get there")
                self._rest("everything is released")
        return self._staged(DEADLINES_S[-1])

    def _staged(self, deadline_s: float) -> Scene:
        scene = Scene(self.faults, self.workers, direct=self.network is not None)
        self.faults.note(f"--- {self.cell}, deadlines {deadline_s} s")
        try:
            scene.bring(self.cell.stage, lambda: [self._ask(r, deadline_s) for r in STRUCK])
        except BaseException:
            scene.close()
            raise
        self.faults.note(f"{self.cell.stage}: {[scene.at(n) for n in range(len(STRUCK))]}")
        return scene

    def _ask(self, request: GenerateRequest, deadline_s: float) -> Asked:
        return Asked(self.client, msgspec.structs.replace(request, deadline_s=deadline_s))

    # The fault

    def _strike(self, scene: Scene) -> list[Asked]:
        """Returns what was asked meanwhile, of the pairs that the fault leaves."""
        prefill, decode = scene.at(0)
        match self.cell.fault:
            case "cancel":
                for asked in scene.asked:
                    self.client.cancel(asked.request.request_id)
            case "deadline":
                self._until(lambda: scene.over, DEADLINE_S, "time is up")
            case "P killed" | "D killed" | "C killed":
                roles = {"prefill": prefill, "decode": decode, "coordinator": "coordinator"}
                self.victim = roles[self.cell.victim or ""]
                self.faults.kill(self.victim)
            case "P stopped" | "D stopped":
                self.victim = prefill if self.cell.victim == "prefill" else decode
                self.faults.stop(self.victim)
            case "link cut":
                return self._cut(scene, prefill, decode)
        scene.let_go()
        return self._meanwhile()

    def _cut(self, scene: Scene, prefill: str, decode: str) -> list[Asked]:
        """It is mended when it has done its harm."""
        assert self.network is not None
        link = self.network.link(prefill, decode)
        self.faults.note(f"the link from {prefill} to {decode} is cut")
        link.cut()
        try:
            scene.let_go()
            meanwhile = self._meanwhile()
            closed = scene.seen["pair_closed"]
            if not self.cell.untouched and self.cell.setting.pairs == 1:
                self._until(lambda: closed.count_seen > 0 or scene.over, DEADLINE_S, "harm is done")
            else:
                self._until(lambda: scene.over, DEADLINE_S, "they end")
        finally:
            link.mend()
            self.faults.note("the link is mended")
        return meanwhile

    def _meanwhile(self) -> list[Asked]:
        return [self._ask(MEANWHILE, DEADLINE_S)] if self.cell.setting.pairs > 1 else []

    # What follows

    def _released(self, before: dict[str, str]) -> float:
        """Seconds until nothing is held anywhere. Returns once everybody is back."""
        if self.victim == "coordinator":
            self.faults.ready(self.client, self.cell.setting.pairs)
        self._rest("everything is released")
        released_s = time.monotonic() - self.struck_s
        if self.victim in before:
            name = self.victim
            self._until(lambda: self._returned(name, before[name]), START_S, f"{name} is back")
        self.faults.ready(self.client, self.cell.setting.pairs)
        self._rest("everything is released again")
        return released_s

    def _rest(self, what: str) -> None:
        """Said by every worker since now."""
        before = self.beats.by.copy()

        def at_rest() -> bool:
            said = self.faults.service.workers(self.client).values()
            fresh = [self.beats.by[w["incarnation"]] > before[w["incarnation"]] + 1 for w in said]
            return all(fresh) and self.faults.service.at_rest(self.client)

        self._until(at_rest, REST_S, what)

    def _returned(self, name: str, before: str) -> bool:
        workers = self.faults.service.workers(self.client)
        return name in workers and workers[name]["incarnation"] != before

    def _check_ends(self, scene: Scene, replays: int) -> None:
        for asked in scene.asked:
            tokens, depths = asked.answer()
            right = self.expected[asked.request.request_id]
            if self.cell.end == RIGHT:
                assert asked.error is None, (asked.end, asked.error)
                assert (tokens, depths) == right
            else:
                assert asked.end == self.cell.end, (asked.end, asked.error)
                assert (tokens, depths) == (right[0][: len(tokens)], right[1][: len(tokens)])
            late_s = (asked.ended_s or 0.0) - asked.asked_s - (asked.request.deadline_s or 0.0)
            assert late_s < LATE_S, f"it ended {late_s:.1f} s after its deadline"
        retries = [asked.retries for asked in scene.asked]
        assert not (self.cell.untouched and any(retries)), retries
        assert any(retries) or not self.cell.must_retry, "the fault met no request"
        assert replays > 0 or not self.cell.must_replay, "nothing was replayed"

    def _check_right(self, asked: Sequence[Asked]) -> None:
        for one in asked:
            assert one.wait(DEADLINE_S), f"{one.request.request_id} did not end"
            assert one.error is None, (one.end, one.error)
            assert one.answer() == self.expected[one.request.request_id]

    def _check_survivors(self, before: dict[str, str], coordinator: int) -> None:
        """Nobody but the victim was started again."""
        again = {name for name in self.workers if self.faults.incarnation(name) != before[name]}
        if self.faults.process("coordinator").pid != coordinator:
            again.add("coordinator")
        assert again == ({self.victim} if self.victim else set()), again

    def _check_later(self) -> None:
        """The same names again, at once."""
        self._check_right([self._ask(request, DEADLINE_S) for request in STRUCK])
        self._rest("everything is released after later requests")

    def _replays(self) -> int:
        return int(self.client.statistics().get("replays", 0))  # type: ignore[call-overload]

    def _until(self, check: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Every look also notes what is quarantined."""

        def look() -> bool:
            workers = self.faults.service.workers(self.client).values()
            blocks = sum(int(w.get("blocks_quarantined", 0)) for w in workers)
            self.quarantined = max(self.quarantined, blocks)
            hits = sum(int(w.get("canary_hits", 0)) for w in workers)
            self.canary_hits = max(self.canary_hits, hits)
            return check()

        eventually(look, lambda: f"{what}; held: {self.faults.service.held}", timeout_s)
