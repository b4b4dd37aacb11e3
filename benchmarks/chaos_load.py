"""Requests for chaos: which there are, how they are sent, what came of each, and what is right.

A request's answer must not depend on what happens around it: it is compared with that of a run that
nobody disturbed. Owns no process.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlt.coordinator.client import AsyncClient
from rlt.runtime.errors import RltError
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import ExitParams, FinishReason, RequestId, SamplingParams

SHORT_S = 5.0
BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)
EXITS = (
    ExitParams(exit_threshold=1.0),
    ExitParams(exit_threshold=0.5, min_loops=1),
    ExitParams(exit_threshold=0.7, min_loops=1, max_loops=3),
    ExitParams(exit_threshold=0.5, min_loops=2),
)
Answer = tuple[tuple[int, ...], tuple[int, ...]]  # tokens, and the loops of each


@dataclass(frozen=True)
class Item:
    """One of the requests that are sent again and again."""

    number: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    exit: ExitParams

    def request(self, name: str, deadline_s: float | None) -> GenerateRequest:
        return GenerateRequest(
            request_id=RequestId(name),
            prompt_token_ids=self.prompt,
            sampling=self.sampling,
            exit=self.exit,
            deadline_s=deadline_s,
        )


def catalogue(seed: int, count: int, max_tokens: int) -> list[Item]:
    """Every length with every exit setting, greedy and seeded."""
    draw = random.Random(seed)
    items = []
    for number in range(count):
        length = LENGTHS[number % 5] if number % 2 else draw.randint(1, 100)
        sampling = SamplingParams(
            max_tokens=draw.randint(max_tokens // 4, max_tokens),
            temperature=0.0 if number % 3 else 0.8,
            top_k=0 if number % 4 else 50,
            top_p=1.0 if number % 5 else 0.9,
            seed=number,
            ignore_eos=number % 7 != 0,
        )
        prompt = tuple(draw.randrange(3, 512) for _ in range(length))
        items.append(Item(number, prompt, sampling, EXITS[(number // 5) % 4]))
    return items


@dataclass
class Record:
    """What came of one request. arrived: when how many tokens came. workers: that its story names.
    broken: tokens that came twice, or out of order."""

    item: Item
    began_s: float
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    arrived: list[tuple[float, int]] = field(default_factory=list)
    workers: frozenset[str] = frozenset()
    finish: FinishReason | None = None
    code: str | None = None
    error: str = ""
    broken: int = 0
    ended_s: float = 0.0
    limited: bool = False  # its deadline was so short that it may have passed

    @property
    def answer(self) -> Answer:
        return tuple(self.tokens), tuple(self.depths)

    @property
    def whole(self) -> bool:
        return self.finish in (FinishReason.STOP, FinishReason.LENGTH)


class Load:
    """Sends items over one connection and keeps a Record of each."""

    def __init__(self, client: AsyncClient, items: Sequence[Item], seed: int) -> None:
        self._client = client
        self._items = items
        self._random = random.Random(seed)
        self._sent = 0
        self._running: set[asyncio.Task[Record]] = set()
        self.records: list[Record] = []

    async def one(
        self, item: Item, *, deadline_s: float | None = 120.0, cancel_after_s: float | None = None
    ) -> Record:
        self._sent += 1
        name = f"chaos-{self._sent}"
        limited = deadline_s is not None and deadline_s < SHORT_S
        record = Record(item, time.monotonic(), limited=limited)
        self.records.append(record)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(delta: Any) -> None:
            _note(record, delta)
            if delta.finish_reason is not None and not ended.done():
                ended.set_result(None)

        try:
            await self._client.link.submit(item.request(name, deadline_s), take)
            if cancel_after_s is not None:
                await asyncio.wait([ended], timeout=cancel_after_s)
                await self._client.cancel(name)
            await ended
        except RltError as error:
            record.code, record.error = error.code, str(error)
        record.ended_s = time.monotonic()
        return record

    async def all_once(self) -> dict[int, Answer]:
        """Each item, some at a time, undisturbed."""
        answers: dict[int, Answer] = {}
        for first in range(0, len(self._items), 8):
            for record in await asyncio.gather(*map(self.one, self._items[first : first + 8])):
                assert record.whole, record
                answers[record.item.number] = record.answer
        self.records.clear()
        return answers

    async def steady(self, rate: float, until: Callable[[], bool]) -> None:
        """`rate` requests a second, at random times, whatever becomes of the earlier ones."""
        while not until():
            self._start(self.one(self._random.choice(self._items)))
            await asyncio.sleep(self._random.expovariate(rate))
        await self.settle()

    async def disturbed(self, at_once: int, until: Callable[[], bool]) -> None:
        """So many at any time; most are cancelled, or get a deadline that may pass."""
        while not until():
            while len(self._running) >= at_once:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            kind, item = self._random.randrange(3), self._random.choice(self._items)
            short_s = self._random.choice((0.01, 0.05, 0.2, 0.5, 1.0)) * self._random.random()
            if kind == 0:
                self._start(self.one(item))
            elif kind == 1:
                self._start(self.one(item, cancel_after_s=short_s))
            else:
                self._start(self.one(item, deadline_s=short_s + 0.005))
        await self.settle()

    async def settle(self) -> None:
        while self._running:
            await asyncio.wait(self._running)
            await asyncio.sleep(0)

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)


def _note(record: Record, delta: Any) -> None:
    now_s = time.monotonic()
    if record.finish is not None or delta.start_index != len(record.tokens):
        record.broken += 1
    record.tokens += delta.token_ids
    record.depths += delta.exit_depths
    if delta.token_ids:
        record.arrived.append((now_s, len(delta.token_ids)))
    if delta.finish_reason is not None:
        record.finish, record.code = delta.finish_reason, delta.error_code
        record.error = delta.error or ""
        record.workers = frozenset(stamp.worker for stamp in delta.timeline if stamp.worker)


class Judge:
    """Right, a tie, or wrong. A whole answer must be the undisturbed one; a part, its beginning."""

    def __init__(self, answers: dict[int, Answer], checkpoint: Path) -> None:
        self._answers = answers
        self._checkpoint = checkpoint
        self._ties: dict[int, int | None] = {}

    def judge(self, record: Record) -> str:
        wanted = self._answers[record.item.number]
        if record.whole and record.answer == wanted:
            return "right"
        tokens, depths = record.answer
        length = len(tokens)
        if not record.whole and (tokens, depths) == (wanted[0][:length], wanted[1][:length]):
            return "part"
        agree = [(t, d) == (wt, wd) for t, d, wt, wd in zip(tokens, depths, *wanted, strict=False)]
        differs = agree.index(False) if False in agree else len(agree)
        tie = self._first_tie(record.item)
        return "tie" if tie is not None and tie <= differs else "wrong"

    def _first_tie(self, item: Item) -> int | None:
        """The first output that may differ without fault, by the plain reference of the tests."""
        if item.number not in self._ties:
            from tests.reference.answer import Ask, answer
            from tests.reference.dense import DenseModel

            sampling, exit = item.sampling, item.exit
            ask = Ask(
                prompt=item.prompt,
                max_tokens=sampling.max_tokens,
                threshold=exit.exit_threshold or 0.0,
                min_loops=exit.min_loops or 2,
                max_loops=exit.max_loops,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                seed=sampling.seed or 0,
                stop=() if sampling.ignore_eos else (2,),
            )
            self._ties[item.number] = answer(DenseModel(self._checkpoint), ask).first_tie()
        return self._ties[item.number]


def tokens_within(
    whole: Sequence[Record], windows: Sequence[tuple[float, float, str]]
) -> dict[str, float]:
    """Tokens a second that came within these windows: of all requests, and of those that went
    through a pair without the window's worker. The client cuts nothing off: what ended later
    counts with what had come."""
    seconds = sum(end_s - begin_s for begin_s, end_s, _ in windows)
    total = untouched = 0
    for begin_s, end_s, worker in windows:
        for record in whole:
            came = sum(count for at_s, count in record.arrived if begin_s <= at_s < end_s)
            total += came
            untouched += came * (worker not in record.workers)
    if not seconds:
        return {}
    return {"all": round(total / seconds, 1), "untouched": round(untouched / seconds, 1)}


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def codes(records: Sequence[Record]) -> Counter[str]:
    return Counter(r.code or "lost" for r in records if r.finish is FinishReason.ERROR or r.code)
