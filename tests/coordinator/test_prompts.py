"""Prompts are tokenized aside, and each client's messages stay in order meanwhile."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import closing

from rlt.connector.messages import AskStatistics, CancelRequest, ClientToCoordinator, Generate
from rlt.coordinator.prompts import Prompt, Prompts
from rlt.runtime.errors import InvalidRequest, Overloaded, TooLong
from rlt.runtime.interfaces import ChatMessage, GenerateRequest
from rlt.runtime.prompt import TextDecoder
from rlt.runtime.types import RequestId


class Gate:
    """A tokenizer that waits until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def encode(self, text: str) -> Sequence[int]:
        assert self.open.wait(10.0)
        if text == "bad":
            raise ValueError("cannot")
        return list(text.encode())

    def render(self, messages: Sequence[ChatMessage]) -> Sequence[int]:
        raise InvalidRequest("no template")

    def decoder(self) -> TextDecoder:
        raise NotImplementedError


def ask(name: str, **prompt: object) -> Generate:
    request = GenerateRequest(request_id=RequestId(name), **prompt)  # type: ignore[arg-type]
    return Generate(submission=next(_submissions), request=request)


_submissions = itertools.count(1)
Handled = tuple[bytes, ClientToCoordinator, Prompt | None]


def handled(act: Callable[[Prompts, Gate], None], count: int, limit: int = 8) -> list[Handled]:
    """What is handed on, once `count` messages have been."""

    async def run() -> list[Handled]:
        gate, seen, full = Gate(), list[Handled](), asyncio.Event()

        def handle(*told: object) -> None:
            seen.append(told)  # type: ignore[arg-type]
            if len(seen) == count:
                full.set()

        with closing(Prompts(gate, handle, limit)) as prompts:
            act(prompts, gate)
            gate.open.set()
            async with asyncio.timeout(5.0):
                await full.wait()
        return seen

    return asyncio.run(run())


def test_what_is_sent_again_while_its_text_is_being_tokenized_is_tokenized_once() -> None:
    text, cancel = ask("r", text="ab"), CancelRequest(request_id=RequestId("r"))

    def act(prompts: Prompts, gate: Gate) -> None:
        for message in (text, text, cancel, text):
            prompts.take(b"one", message)

    assert handled(act, 2) == [(b"one", text, (97, 98)), (b"one", cancel, None)]


def test_a_cancel_does_not_overtake_a_text_and_other_clients_do_not_wait() -> None:
    text, cancel = ask("r", text="ab"), CancelRequest(request_id=RequestId("r"))
    other = AskStatistics(ask=1)

    def act(prompts: Prompts, gate: Gate) -> None:
        prompts.take(b"one", text)
        prompts.take(b"one", cancel)
        prompts.take(b"two", other)

    assert handled(act, 3) == [
        (b"two", other, None),
        (b"one", text, (97, 98)),
        (b"one", cancel, None),
    ]


def test_what_is_wrong_with_a_text_is_handed_on_in_its_place() -> None:
    asks = [
        ask("bad", text="bad"),
        ask("long", text="x" * (1 << 20) + "y"),
        ask("chat", messages=(ChatMessage("user", "x"),)),
        ask("ids", prompt_token_ids=(1, 2)),
    ]

    def act(prompts: Prompts, gate: Gate) -> None:
        for message in asks:
            prompts.take(b"one", message)

    told = handled(act, 4)
    assert [message for _, message, _ in told] == asks
    bad, long, chat, ids = (prompt for _, _, prompt in told)
    assert getattr(bad, "code", None) == "internal" and "cannot" in str(bad)
    assert isinstance(long, TooLong) and isinstance(chat, InvalidRequest) and ids is None


def test_more_texts_than_may_wait_are_refused() -> None:
    def act(prompts: Prompts, gate: Gate) -> None:
        for number in range(3):
            prompts.take(b"%d" % number, ask("r", text="a"))

    prompts = [prompt for _, _, prompt in handled(act, 3, limit=2)]
    assert sum(isinstance(prompt, Overloaded) for prompt in prompts) == 1
    assert sum(prompt == (97,) for prompt in prompts) == 2


def test_a_client_that_is_forgotten_is_not_heard_any_more() -> None:
    last = AskStatistics(ask=1)

    def act(prompts: Prompts, gate: Gate) -> None:
        prompts.take(b"one", ask("r", text="ab"))
        prompts.forget(b"one")
        prompts.take(b"two", ask("r", text="c"))
        prompts.take(b"two", last)

    assert [client for client, _, _ in handled(act, 2)] == [b"two", b"two"]
