"""The axes that are crossed, every combination of them, and the sample that each run takes.

Pure data: names engine settings and requests' settings, starts nothing. Every combination of the
axes has a meaning and is there. What has none, and so is no axis value of its own: growth on P,
which takes a prompt's blocks at once (with "pd", D alone grows and preempts); chunks of `shared`
change only how many positions one turn takes. Exits "mixed" puts requests of every exit mode,
random_lookahead too, into one batch. Hits on P and on D apart: test_prefix_pd.py.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import combinations, product
from typing import Any

BLOCK = 4
RANDOM_HEAD_SEED = 11


@dataclass(frozen=True, kw_only=True, order=True)
class Engine:
    """One engine configuration: cases that share it share the running engines."""

    model: str
    where: str
    layout: str
    scheduling: str
    prompts: str
    admission: str
    prefix: str

    def settings(self, planes: int) -> dict[str, Any]:
        """EngineConfig's fields. planes: of the layout."""
        return {
            "layout": self.layout,
            "async_scheduling": self.scheduling == "async",
            "chunk_tokens": 512 if self.prompts == "whole" else 5,
            "admission": "incremental" if self.preempts else "full",
            "prefix_cache": self.caches,
            "num_blocks": self._plane_blocks() * planes,
            "block_size": BLOCK,
            "num_slots": 6,
            "num_receive_slots": 6,
            "threads": 1,
            "device": "cpu",
            "random_head_seed": RANDOM_HEAD_SEED,
        }

    @property
    def preempts(self) -> bool:
        return self.admission == "preempt"

    @property
    def caches(self) -> bool:
        return self.prefix == "cached"

    def _plane_blocks(self) -> int:
        """The largest request needs 6, all together 37, and 16 for their prompts alone."""
        if self.preempts:
            return 14
        return 64 if self.caches else 20


@dataclass(frozen=True, kw_only=True, order=True)
class Case:
    engine: Engine
    exits: str

    def __str__(self) -> str:
        values = [getattr(self.engine, field.name) for field in fields(Engine)]
        return "-".join([*values, self.exits])


AXES = {
    "model": ("flat", "deep"),
    "where": ("local", "pd"),
    "layout": ("last_exited", "shared"),
    "scheduling": ("sync", "async"),
    "prompts": ("whole", "chunked"),
    "admission": ("full", "preempt"),
    "prefix": ("plain", "cached"),
}
EXITS = ("ouro", "delayed", "trace", "mixed")


def all_cases() -> list[Case]:
    """Those of one engine next to each other."""
    engines = [Engine(**dict(zip(AXES, values, strict=True))) for values in product(*AXES.values())]
    return [Case(engine=engine, exits=exits) for engine in engines for exits in EXITS]


def sample_of(cases: list[Case], strength: int = 3) -> set[Case]:
    """A fixed few in which every `strength` values of different axes meet at least once."""
    shuffled = random.Random(7).sample(cases, len(cases))
    meetings = {case: frozenset(_meetings(case, strength)) for case in shuffled}
    uncovered = set().union(*meetings.values())
    chosen: set[Case] = set()
    while uncovered:
        best = max(shuffled, key=lambda case: len(meetings[case] & uncovered))
        chosen.add(best)
        uncovered -= meetings[best]
    return chosen


def _meetings(case: Case, strength: int) -> Iterator[tuple[tuple[str, str], ...]]:
    values = [(axis, getattr(case.engine, axis)) for axis in AXES] + [("exits", case.exits)]
    return combinations(values, strength)
