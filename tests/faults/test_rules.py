"""Rules and schedules of the relay, without a relay."""

from typing import Any

import msgspec
import pytest

from .rules import Letter, Rule, Schedule, letter

P = (1, "decode", b"prefill-0-ab")


def message(kind: str, **fields: Any) -> Letter:
    frame = msgspec.msgpack.encode({"type": kind, **fields})
    return letter(frame, P)  # type: ignore[arg-type]


def test_a_letter_names_the_generations_in_it() -> None:
    assert message("commit", generation=5).generations == {5}
    assert message("output", rows=[{"generation": 3}, {"generation": 4}]).generations == {3, 4}
    assert message("confirm", rows=[[3, 1], [6, 2]]).generations == {3, 6}
    assert message("alive").generations == frozenset()


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x05", b"\x91" * 5000])
def test_a_frame_that_is_no_message_has_no_kind(frame: bytes) -> None:
    assert letter(frame, P).kind == ""  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "taken"),
    [
        (Rule("drop"), True),
        (Rule("drop", "commit"), True),
        (Rule("drop", "chunk"), False),
        (Rule("drop", to="decode"), True),
        (Rule("drop", to="prefill"), False),
        (Rule("drop", peer="prefill-0"), True),
        (Rule("drop", peer="prefill-1"), False),
        (Rule("drop", generation=5), True),
        (Rule("drop", generation=6), False),
    ],
    ids=str,
)
def test_a_rule_is_for_what_fits_all_that_it_names(rule: Rule, taken: bool) -> None:
    assert rule.takes(message("commit", generation=5)) == taken
    assert rule.seen.is_set() == taken


def test_a_rule_may_let_some_pass_first_and_end_after_some() -> None:
    rule = Rule("drop", skip=1, count=2)
    assert [rule.takes(message("ack")) for _ in range(5)] == [False, True, True, False, False]


def fates(schedule: Schedule, kinds: list[str]) -> dict[tuple[str, int], str]:
    seen: dict[tuple[str, int], str] = {}
    for kind in kinds:
        rule = schedule.rule(message(kind))
        number = sum(k == kind for k, _ in seen)
        seen[kind, number] = f"{rule.action} {rule.delay_s}" if rule else ""
    return seen


def test_a_schedule_says_the_same_about_a_message_whenever_it_comes() -> None:
    kinds = ["commit", "ack", "chunk"] * 50
    rates: dict[str, Any] = {"copy": 0.3, "delay": 0.3, "drop": 0.3, "lossy": frozenset({"chunk"})}
    once = fates(Schedule(7, **rates), kinds)
    assert once == fates(Schedule(7, **rates), sorted(kinds))
    assert once != fates(Schedule(8, **rates), kinds)
    lost = {kind for (kind, _), fate in once.items() if fate.startswith("drop")}
    assert lost == {"chunk"}
