"""Runs one cell: stage, fault, and everything that must hold afterwards.

Owns what is asked and what is checked. The service stays as it is for the next cell: every worker
back, nothing held, nothing ordered.
"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from rlt.coordinator.client import Client
from rlt.runtime.interfaces import GenerateRequest

from ..system.namespaces import Network
from ..system.service import START_S
from .asked import Answer, Asked
from .faults import Faults
from .matrix import RIGHT, Cell, Result
from .matrix_requests import MEANWHILE, STRUCK
from .matrix_stage import Scene, TooSoon
from .matrix_watch import Watch

DEADLINE_S = 120.0  # of requests that are to be answered
DEADLINES_S = (1.5, 4.0, 10.0)  # of those that are not: a slow machine needs longer to the stage
LATE_S = 2.0  # how long after its deadline a client may hear of it


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
        self.watch = Watch(faults, client)
        self.victim = ""
        self.struck_s = 0.0

    def result(self) -> Result:
        with self.watch:
            return self._result()

    def _result(self) -> Result:
        before = {name: self.faults.incarnation(name) for name in self.workers}
        coordinator = self.faults.process("coordinator").pid
        replays = self._replays()
        scene = self._bring()
        try:
            self.struck_s = time.monotonic()
            meanwhile = self._strike(scene)
            self.watch.until(lambda: scene.over, DEADLINE_S, "they end")
            released_s = self._released(before)
        finally:
            scene.close()
        replays = self._replays() - (0 if self.victim == "coordinator" else replays)
        self._check_ends(scene, replays)
        self._check_right(meanwhile)
        self._check_survivors(before, coordinator)
        self._check_later()
        assert self.watch.canary_hits == 0
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
            quarantined=self.watch.quarantined,
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
                self.watch.rest("everything is released")
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
                self.watch.until(lambda: scene.over, DEADLINE_S, "time is up")
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
                self.watch.until(
                    lambda: closed.count_seen > 0 or scene.over, DEADLINE_S, "harm is done"
                )
            else:
                self.watch.until(lambda: scene.over, DEADLINE_S, "they end")
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
        self.watch.rest("everything is released")
        released_s = time.monotonic() - self.struck_s
        if self.victim in before:
            name = self.victim
            self.watch.until(lambda: self._returned(name, before[name]), START_S, f"{name} is back")
        self.faults.ready(self.client, self.cell.setting.pairs)
        self.watch.rest("everything is released again")
        return released_s

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
        elsewhere = [n for n in range(len(retries)) if not self._struck(scene, n)]
        assert not any(retries[n] for n in elsewhere), "one on an untouched pair was retried"
        assert any(retries) or not self.cell.must_retry, "the fault met no request"
        assert replays > 0 or not self.cell.must_replay, "nothing was replayed"

    def _struck(self, scene: Scene, number: int) -> bool:
        """Whether the fault took anything of the pair that has this request."""
        if self.cell.fault == "link cut":
            return scene.at(number) == scene.at(0)
        return self.cell.victim not in ("prefill", "decode") or self.victim in scene.at(number)

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
        self.watch.rest("everything is released after later requests")

    def _replays(self) -> int:
        statistics: Any = self.client.statistics()
        return int(statistics.get("replays", 0))
