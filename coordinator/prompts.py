"""Tokenizes prompts on a thread of its own, and keeps each client's messages in order meanwhile.

Owns the thread and what waits for it. The event loop never tokenizes: a long text would stop every
stream. A client's later messages wait behind its text, so that a cancel cannot overtake a request.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from ..connector.messages import ClientToCoordinator, Generate
from ..runtime.errors import Overloaded, RequestError, TooLong
from ..runtime.interfaces import GenerateRequest
from ..runtime.prompt import Tokenizer, prompt_token_ids

MAX_TEXT_BYTES = 1 << 20

Prompt = tuple[int, ...] | RequestError  # its token IDs, or why there are none
A = TypeVar("A")
T = TypeVar("T")
Handle = Callable[[bytes, ClientToCoordinator, Prompt | None], None]


def read_prompt(asked: GenerateRequest, tokenizer: Tokenizer | None) -> Prompt:
    """For any thread. Whatever a tokenizer does with a text ends that one request."""
    try:
        texts = [asked.text or "", *(m.role + m.content for m in asked.messages or ())]
        num_bytes = sum(len(text.encode()) for text in texts)
        if num_bytes > MAX_TEXT_BYTES:
            raise TooLong(
                f"the text has {num_bytes} bytes; at most {MAX_TEXT_BYTES} are tokenized here: "
                "shorten it, or send prompt_token_ids"
            )
        return tuple(prompt_token_ids(asked, tokenizer))
    except RequestError as error:
        return error
    except Exception as error:
        return RequestError(f"the tokenizer failed: {type(error).__name__}: {error}")


@dataclass
class _Held:
    message: ClientToCoordinator
    prompt: "asyncio.Future[Prompt] | None"


class Prompts:
    """handle: called on the loop, in order for each client."""

    def __init__(self, tokenizer: Tokenizer | None, handle: Handle, max_waiting: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._tokenizer = tokenizer
        self._handle = handle
        self._max_waiting = max_waiting
        self._waiting = 0
        self._lines: dict[bytes, deque[_Held]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def take(self, client: bytes, message: ClientToCoordinator) -> None:
        if isinstance(message, Generate) and self._has(client, message.submission):
            return  # it was sent again while its text is still being tokenized
        prompt = None
        if isinstance(message, Generate) and message.request.prompt_token_ids is None:
            prompt = self.start(message.request)
            prompt.add_done_callback(lambda _: self._advance(client))
        if prompt is None and client not in self._lines:
            self._handle(client, message, None)
        else:
            self._lines.setdefault(client, deque()).append(_Held(message, prompt))

    def _has(self, client: bytes, submission: int) -> bool:
        messages = (held.message for held in self._lines.get(client, ()))
        return any(isinstance(m, Generate) and m.submission == submission for m in messages)

    def start(self, asked: GenerateRequest) -> "asyncio.Future[Prompt]":
        """Never raises: its result says what is wrong."""
        if self._waiting >= self._max_waiting:
            refused: asyncio.Future[Prompt] = self._loop.create_future()
            refused.set_result(Overloaded(f"{self._waiting} texts wait to be tokenized: try later"))
            return refused
        self._waiting += 1
        prompt = self._loop.run_in_executor(self._thread, read_prompt, asked, self._tokenizer)
        prompt.add_done_callback(self._done)
        return prompt

    def aside(self, act: Callable[[A], T], given: A) -> "asyncio.Future[T]":
        """Any other work with texts, on the same thread."""
        return self._loop.run_in_executor(self._thread, act, given)

    def forget(self, client: bytes) -> None:
        self._lines.pop(client, None)

    def close(self) -> None:
        self._lines.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _done(self, _: "asyncio.Future[Prompt]") -> None:
        self._waiting -= 1

    def _advance(self, client: bytes) -> None:
        line = self._lines.get(client)
        while line and (line[0].prompt is None or line[0].prompt.done()):
            held = line.popleft()
            if not line:
                del self._lines[client]
            if held.prompt is None:
                self._handle(client, held.message, None)
            elif not held.prompt.cancelled():
                self._handle(client, held.message, held.prompt.result())
