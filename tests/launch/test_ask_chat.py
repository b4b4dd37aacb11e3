"""rlt-ask as a chat, in a terminal, with a real service behind it."""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlt.coordinator.client import Client
from rlt.launch.depth_colours import RESET, SCALE, depth_counts, painted
from rlt.launch.running import running_service

from ..system.service import eventually
from .terminal import CTRL_C, CTRL_D, Terminal, terminal

QUESTION = "Ana has 17 apples. Ben gives Ana 25 apples. How many apples does Ana have?"
ANSWER = "17 + 25 = 42. The answer is 42."
ASK = ("-m", "rlt.launch.ask")
PROMPT = "> "


@pytest.fixture(scope="module")
def service() -> Iterator[Client]:
    small = ("--num-blocks", "2048", "--threads", "1", "--no-http")
    with (
        tempfile.TemporaryDirectory(prefix="rlt-t") as folder,
        running_service(["--runtime-dir", folder, *small]) as service,
        Client(service.endpoint) as client,
    ):
        yield client


def chatting(service: Client, *options: str, **environment: str) -> Any:
    return terminal([*ASK, "--connect", service.endpoint, *options], **environment)


def say(chat: Terminal, text: str) -> str:
    """What is shown between the line that was typed and the next prompt."""
    chat.type(text + "\n")
    chat.until(text)
    return chat.until(f"\n{PROMPT}").removesuffix(PROMPT).strip()


def figure(service: Client, name: str) -> float:
    value = service.stats().get(name, 0.0)
    assert isinstance(value, float)
    return value


def asked(service: Client, text: str, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", *ASK, "--connect", service.endpoint, *options],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )


pytestmark = pytest.mark.system


def test_a_chat_streams_answers_in_the_colours_of_their_loops(service: Client) -> None:
    with chatting(service) as chat:
        chat.until(PROMPT)
        shown = say(chat, QUESTION)
        assert shown.startswith(ANSWER + "\n")
        assert re.search(r"\d+ tokens, [\d.]+ per second; loops .*4×\d+", shown)  # noqa: RUF001
        colours = set(re.findall(r"\x1b\[38;5;(\d+)m", chat.everything))
        assert str(SCALE[-1]) in colours and len(colours) > 1
        assert say(chat, "/depths").startswith("exit depths: 4 ")
        assert "depth 3" in say(chat, "/timeline")
        chat.type(CTRL_D)
        assert chat.end() == 0


def test_the_conversation_goes_along_until_it_is_reset(service: Client) -> None:
    with chatting(service, "--max-tokens", "4") as chat:
        chat.until(PROMPT)

        def prompt_length() -> int:
            say(chat, QUESTION)
            times = re.findall(r"(\d+) prompt tokens", say(chat, "/depths"))
            return int(times[0])

        first, second = prompt_length(), prompt_length()
        assert second > first + 10
        assert say(chat, "/undo") == f"forgotten: {QUESTION}"
        assert prompt_length() == second
        assert say(chat, "/system Be brief.") == "system: Be brief."
        assert say(chat, "/reset") == "forgotten"
        assert prompt_length() > first
        say(chat, "/system")
        say(chat, "/reset")
        assert prompt_length() == first
        chat.type("/quit\n")
        assert chat.end() == 0


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(service: Client) -> None:
    with chatting(service, "--max-tokens", "3000", "--temperature", "50") as chat:
        chat.until(PROMPT)
        chat.type("/set seed 2\n")  # 953 tokens: long enough to be stopped
        chat.until(f"\n{PROMPT}")
        before = figure(service, "ended.cancelled")
        chat.type("Tell me everything.\n")
        deadline = time.monotonic() + 20
        while not figure(service, "live_requests") and time.monotonic() < deadline:
            time.sleep(0.01)
        chat.type(CTRL_C)
        assert "(stopped)" in chat.until(f"\n{PROMPT}", 5.0)
        eventually(lambda: figure(service, "live_requests") == 0, "nothing is live")
        assert figure(service, "ended.cancelled") == before + 1
        chat.type(CTRL_C)
        chat.until("(Ctrl-D or /quit leaves)")
        say(chat, "/reset")
        say(chat, "/set temperature")
        assert say(chat, QUESTION).startswith(ANSWER)


def test_settings_change_what_is_asked_and_a_failed_turn_leaves_no_trace(service: Client) -> None:
    with chatting(service, "--exit-threshold", "0.5", "--min-loops", "1") as chat:
        chat.until(PROMPT)
        assert re.search(r"^exit-threshold +0.5$", say(chat, "/set"), re.M)
        say(chat, QUESTION)
        assert set(say(chat, "/depths").split("mean")[0]) & set("123")
        assert say(chat, "/set exit-threshold 1") == "exit-threshold: 1.0"
        say(chat, QUESTION)
        assert not set(say(chat, "/depths").split(", mean")[0].removeprefix("exit depths:")) - set(
            " 4"
        )
        assert say(chat, "/set exit-threshold 7") == "exit-threshold: must be at most 1, got 7"
        assert say(chat, "/set exit-mode odd").startswith("exit-mode: one of ouro, ")
        assert say(chat, "/set nothing 1").startswith("no setting nothing: there are max-tokens,")
        assert say(chat, "/nothing") == "no command /nothing: /help lists them"
        say(chat, "/set max-loops 9")
        assert say(chat, "Hello").startswith("error: invalid_request: ")
        say(chat, "/set max-loops")
        assert say(chat, "/undo") == f"forgotten: {QUESTION}"


def test_colours_go_to_terminals_unless_told_otherwise(service: Client) -> None:
    assert asked(service, "", QUESTION).stdout == ANSWER + "\n"
    forced = asked(service, "", QUESTION, "--colour").stdout
    assert RESET in forced and re.sub(r"\x1b\[[\d;]*m", "", forced) == ANSWER + "\n"
    with chatting(service, QUESTION) as once:
        assert once.end() == 0
        assert "\x1b[38;5;" in once.everything
    with chatting(service, QUESTION, NO_COLOR="1") as once:
        assert once.end() == 0
        assert once.everything == ANSWER + "\r\n"


def test_a_question_may_come_through_a_pipe(service: Client) -> None:
    assert asked(service, QUESTION).stdout == ANSWER + "\n"


def test_what_needs_a_question_says_so(service: Client) -> None:
    with chatting(service, "--json") as chat:
        assert chat.end() == 2
        assert "error: --json/--raw: needs a question" in chat.everything


def test_a_painted_text_is_the_text_and_ends_its_colour_before_each_line() -> None:
    shown = painted("one\ntwo\n", 2, 4)
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == "one\ntwo\n"
    assert all(not part or part.endswith(RESET) for part in shown.split("\n"))


@pytest.mark.parametrize("num_loops", [1, 2, 4, 8, 40])
def test_few_loops_are_cool_and_all_loops_warm(num_loops: int) -> None:
    assert f";{SCALE[-1]}m" in painted("x", num_loops, num_loops)
    assert num_loops == 1 or f";{SCALE[0]}m" in painted("x", 1, num_loops)
    assert f";{SCALE[-1]}m" in painted("x", 99, num_loops)
    assert depth_counts([1, 1, 3], 4, colour=False) == "1×2 3×1"  # noqa: RUF001
