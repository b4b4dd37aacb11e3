"""Brings requests into exactly one stage, holds them there, and lets them go.

Owns the rules and orders of one cell. A stage counts as reached only when the processes have said
or done what shows it for every request.
"""

from collections.abc import Callable, Sequence
from typing import Any, assert_never

import msgspec

from ..system.service import eventually
from .asked import Asked
from .faults import Faults
from .matrix import Stage
from .rules import Letter, Rule

STAGED_S = 40.0
SEEN = (
    "reserve",
    "prefill_accepted",
    "prefill_complete",
    "commit",
    "received",
    "activated",
    "pair_closed",
)
CHUNKS = 5  # of each request: four planes and the hidden state


class TooSoon(Exception):
    """A request ended before it was in the stage."""


class Witness(Rule):
    """Remembers the first message of each generation, and treats none."""

    def __init__(self, kind: str) -> None:
        super().__init__("delay", kind)
        self.letters: dict[int, Letter] = {}
        self.count_seen = 0

    def takes(self, letter: Letter) -> bool:
        if self._matches(letter):
            self.count_seen += 1
            for generation in letter.generations:
                self.letters.setdefault(generation, letter)
        return False


class Scene:
    """direct: prefill workers dial decode workers themselves, so that no rule is asked about what
    they say to each other."""

    def __init__(self, faults: Faults, workers: Sequence[str], *, direct: bool) -> None:
        self._faults = faults
        self._direct = direct
        self._workers = workers
        self._rules: list[Rule] = []
        self._begun = {name: len(faults.events(name)) for name in workers}
        self.seen = {kind: Witness(kind) for kind in SEEN}
        for witness in self.seen.values():
            faults.relay.add(witness)
        self.asked: list[Asked] = []

    def bring(self, stage: Stage, ask: Callable[[], list[Asked]]) -> None:
        match stage:
            case "reserving":
                reserved = self._hold("reserved")
                self._ask(ask)
                self._until(lambda: len(_generations(reserved)) == len(self.asked), "D has")
            case "computing":
                self._order("prefill", at="compute", stage="prefill", after=2)
                self._ask(ask)
                self._all_said("prefill_accepted")
                self._all_did("prefill", "held")
            case "sending":
                self._order("prefill", at="post", sequence=1)
                self._ask(ask)
                self._all_said("prefill_complete")
                self._all_did("prefill", "posted")
                self._nobody_said("commit")
            case "committed":
                self._order("decode", at="notice", sequence=1)
                self._ask(ask)
                self._commit()
                self._nobody_said("received")
            case "activating":
                if not self._direct:
                    self._hold("ack")
                self._activate(ask)
            case "decoding":
                self._activate(ask)
                self._order("decode", at="compute", stage="recurrent", after=8)
                self._until(lambda: all(a.tokens >= 2 for a in self.asked), "tokens came")
                self._all_did("decode", "held", times=2)
            case _:
                assert_never(stage)

    @property
    def over(self) -> bool:
        return all(asked.over for asked in self.asked)

    def let_go(self) -> None:
        """What was held goes on, as far as whoever has it still lives."""
        for name in self._workers:
            self._faults.order(name)
        for rule in self._rules:
            self._faults.release(rule)
        self._rules = []

    def close(self) -> None:
        self.let_go()
        for witness in self.seen.values():
            self._faults.relay.forget(witness)

    def at(self, number: int) -> tuple[str, str]:
        """Names of the prefill and the decode worker that have this request, at first."""
        generation = sorted(self.seen["reserve"].letters)[number]
        letter = self.seen["reserve"].letters[generation]
        prefill = msgspec.msgpack.decode(letter.frame)["prefill"]
        return prefill.rpartition("-")[0], letter.peer.rpartition("-")[0]

    def _ask(self, ask: Callable[[], list[Asked]]) -> None:
        self.asked = ask()
        self._until(lambda: len(self.seen["reserve"].letters) >= len(self.asked), "C has reserved")

    def _activate(self, ask: Callable[[], list[Asked]]) -> None:
        self._order("decode", at="compute", stage="coda")
        self._ask(ask)
        self._all_said("activated")
        self._all_did("decode", "held")

    def _commit(self) -> None:
        if not self._direct:
            self._all_said("commit")
            return
        names = {self.at(number)[0] for number in range(len(self.asked))}
        chunks = CHUNKS * len(self.asked)
        self._until(lambda: sum(self._did(n, "ended") for n in names) == chunks, "P has sent all")

    def _hold(self, kind: str) -> Rule:
        rule = self._faults.hold(kind)
        self._rules.append(rule)
        return rule

    def _order(self, role: str, **order: Any) -> None:
        for name in self._workers:
            if name.startswith(role):
                self._faults.order(name, {"do": "hold", **order})

    def _all_said(self, kind: str) -> None:
        letters = self.seen[kind].letters
        self._until(lambda: len(letters) == len(self.asked), f"all have said {kind}")

    def _nobody_said(self, kind: str) -> None:
        assert not self.seen[kind].letters, f"beyond the stage: {kind} was said"

    def _all_did(self, role: str, event: str, times: int = 1) -> None:
        """Every worker of this role that has one of the requests."""
        place = 0 if role == "prefill" else 1
        names = {self.at(number)[place] for number in range(len(self.asked))}
        self._until(
            lambda: all(self._did(name, event) >= times for name in names), f"{names}: {event}"
        )

    def _did(self, name: str, event: str) -> int:
        return sum(e["event"] == event for e in self._faults.events(name)[self._begun[name] :])

    def _until(self, check: Callable[[], bool], what: str) -> None:
        def reached() -> bool:
            if any(asked.over for asked in self.asked):
                raise TooSoon([(asked.end, asked.error) for asked in self.asked if asked.over])
            return check()

        eventually(reached, what, STAGED_S)


def _generations(rule: Rule) -> set[int]:
    return {generation for letter in list(rule.kept) for generation in letter.generations}
