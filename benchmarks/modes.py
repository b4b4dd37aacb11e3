"""What exit depths and scheduling modes are worth, alternating in one run.

    python -P benchmarks/modes.py [--rounds 5] [--threads 1] [--batches 1 16] [--tokens 49]

The model of decode_speed.py through the whole local engine; times decoding alone. Depths come from
traces (every token's depth given), so that all runs of a comparison do exactly the work they say:

* early exit: a trace of mean depth 2.5 of 4 against fixed depth, batch 16: at least 0.9 x 4 / 2.5
* refill: the same trace with and without it (without, a cohort's CODA waits for its last member)
* ahead: passes submitted ahead of results (tokens stay on the device) against one at a time

Where both sides have the same traces, they must choose the same tokens. Ratios are medians of
paired rounds, in wall time and (for a busy machine) in processor time of this process.
"""

import argparse
import importlib.util
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from rlt.runtime.clock import SystemClock
from rlt.runtime.config import EngineConfig, SchedulerConfig
from rlt.runtime.engine_core import EngineCore
from rlt.runtime.events import TokensProduced
from rlt.runtime.executor import ThreadExecutor, build_executor
from rlt.runtime.types import EngineRequest, ExitSettings, Generation, SamplingParams

PROMPT_TOKENS = 64
BATCH = 16
LOOPS = 4
MEAN_DEPTH = 2.5
WANTED = 0.9 * LOOPS / MEAN_DEPTH


class Outcome(NamedTuple):
    rate: float  # decoded tokens per second
    cpu_rate: float  # and per second of processor time
    tokens: list[list[int]]


class Engine:
    """One way of scheduling on a shared executor; its owner drives it to the end of each batch."""

    numbers = itertools.count(1)

    def __init__(self, executor: ThreadExecutor, *, refill: bool = True, ahead: bool = False):
        self._executor = executor
        config = SchedulerConfig(
            chunk_tokens=BATCH * PROMPT_TOKENS, refill=refill, max_in_flight=2 if ahead else 1
        )
        self._core = EngineCore(executor, config, clock=SystemClock())

    def decode(self, prompts: Sequence[Sequence[int]], traces: Sequence[Sequence[int]]) -> Outcome:
        """Greedy. Counts from the moment when every request has its first token."""
        tokens: dict[Generation, list[int]] = {}
        for prompt, trace in zip(prompts, traces, strict=True):
            generation = Generation(next(self.numbers))
            tokens[generation] = []
            self._core.add_local(
                EngineRequest(
                    generation=generation,
                    prompt=tuple(prompt),
                    sampling=SamplingParams(max_tokens=len(trace), seed=0, ignore_eos=True),
                    exit=ExitSettings(1.0, 1, LOOPS, mode="trace", trace=tuple(trace)),
                )
            )
        started_s = started_cpu_s = 0.0
        before = 0
        while not self._core.idle():
            for event in self._core.step():
                if isinstance(event, TokensProduced):
                    tokens[event.generation] += event.token_ids
            if not started_s and all(tokens.values()):
                started_s, started_cpu_s = time.perf_counter(), time.process_time()
                before = sum(map(len, tokens.values()))
            if not self._core.idle():
                self._executor.wait(60.0)
        decoded = sum(map(len, tokens.values())) - before
        return Outcome(
            rate=decoded / (time.perf_counter() - started_s),
            cpu_rate=decoded / (time.process_time() - started_cpu_s),
            tokens=list(tokens.values()),
        )


def fixed_traces(batch: int, tokens: int) -> list[list[int]]:
    return [[LOOPS] * tokens for _ in range(batch)]


def mixed_traces(batch: int, tokens: int) -> list[list[int]]:
    """Every depth equally often in each request, in its own order: the mean is MEAN_DEPTH."""
    choose = random.Random(0)
    traces = []
    for _ in range(batch):
        depths = [1 + index % LOOPS for index in range(tokens - 1)]
        choose.shuffle(depths)
        traces.append([LOOPS, *depths])
    return traces


def compare(
    label: str,
    rounds: int,
    prompts: Sequence[Sequence[int]],
    base: tuple[Engine, Sequence[Sequence[int]]],
    other: tuple[Engine, Sequence[Sequence[int]]],
) -> float:
    """Alternate base and other -> the median of their rounds' ratios."""
    kept: list[tuple[Outcome, Outcome]] = []
    for number in range(rounds + 1):
        pair = (base[0].decode(prompts, base[1]), other[0].decode(prompts, other[1]))
        if base[1] == other[1] and pair[0].tokens != pair[1].tokens:
            raise SystemExit(f"{label}: the two sides chose different tokens")
        if number:  # the first round warms both sides up
            kept.append(pair)
    ratios = sorted(after.rate / before.rate for before, after in kept)
    cpu = statistics.median(after.cpu_rate / before.cpu_rate for before, after in kept)
    rates = [statistics.median(pair[side].rate for pair in kept) for side in (0, 1)]
    ratio = statistics.median(ratios)
    print(
        f"{label}: {rates[0]:7.1f} -> {rates[1]:7.1f} tokens/s, ratio {ratio:.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f}), in processor time {cpu:.2f}"
    )
    return ratio


def run(executor: ThreadExecutor, args: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(1)
    every = torch.randint(512, (max([BATCH, *args.batches]), PROMPT_TOKENS), generator=generator)
    prompts = every.tolist()
    plain, cohorts = Engine(executor), Engine(executor, refill=False)
    ahead = Engine(executor, ahead=True)
    fixed, mixed = fixed_traces(BATCH, args.tokens), mixed_traces(BATCH, args.tokens)
    batch = prompts[:BATCH]
    for name, engine in (("", plain), (", ahead", ahead)):
        label = f"early exit, batch {BATCH}{name}: fixed depth {LOOPS} -> mean depth {MEAN_DEPTH}"
        ratio = compare(label, args.rounds, batch, (engine, fixed), (engine, mixed))
        print(f"    wanted at least {WANTED:.2f}: {'met' if ratio >= WANTED else 'NOT met'}")
    label = f"refill, batch {BATCH}: without -> with"
    compare(label, args.rounds, batch, (cohorts, mixed), (plain, mixed))
    for size in args.batches:
        traces = fixed_traces(size, args.tokens)
        label = f"ahead, batch {size}, fixed depth: one pass at a time -> two submitted"
        compare(label, args.rounds, prompts[:size], (plain, traces), (ahead, traces))


def sibling(name: str) -> ModuleType:
    """Another benchmark: with -P, this folder is not on the path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=49, help="per request; 1 + a multiple of 4")
    args = parser.parse_args()
    model = sibling("decode_speed")
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {args.threads} thread(s), float32, {json.dumps(model.CONFIG)}"
    )
    with tempfile.TemporaryDirectory() as folder:
        model.random_checkpoint(Path(folder))
        executor = build_executor(
            EngineConfig(model=folder, threads=args.threads, device="cpu"), progress=print
        )
        try:
            run(executor, args)
        finally:
            executor.shutdown()


if __name__ == "__main__":
    main()
