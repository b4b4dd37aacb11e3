"""What early exits give: decode rate at a mean depth of 2.5 of 4 over fixed depth, in one run.

    python -P benchmarks/mixed_depths.py [--rounds 5] [--threads 1] [--batch 16] [--device cpu]

Random weights as in decode_speed.py, a full batch, prompts of 32 tokens and 48 decoded ones. Depths
are given by traces, drawn evenly from 1 to 4. Rounds alternate between the ways to run, whose order
changes: fixed depth, and mixed depths with refill, without it, and with asynchronous scheduling.
"""

import argparse
import importlib.util
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from types import ModuleType

import torch

from rlt.runtime.clock import SystemClock
from rlt.runtime.config import EngineConfig, SchedulerConfig
from rlt.runtime.engine_core import EngineCore
from rlt.runtime.events import TokensProduced
from rlt.runtime.executor import ThreadExecutor, build_executor
from rlt.runtime.types import EngineRequest, ExitSettings, Generation, SamplingParams


def _neighbour(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


decode_speed = _neighbour("decode_speed")
CONFIG = decode_speed.CONFIG
LOOPS = CONFIG["total_ut_steps"]
PROMPT_TOKENS = 32
NEW_TOKENS = 48
WAYS = {
    "fixed depth": SchedulerConfig(chunk_tokens=4096),
    "refill": SchedulerConfig(chunk_tokens=4096),
    "no refill": SchedulerConfig(chunk_tokens=4096, refill=False),
    "refill, asynchronous": SchedulerConfig(chunk_tokens=4096, max_in_flight=2),
}


class Requests:
    """The same prompts and depths for every way to run."""

    def __init__(self, batch: int) -> None:
        draw = random.Random(0)
        self.prompts = [
            tuple(draw.randrange(CONFIG["vocab_size"]) for _ in range(PROMPT_TOKENS))
            for _ in range(batch)
        ]
        self.traces = [
            (LOOPS, *(draw.randint(1, LOOPS) for _ in range(NEW_TOKENS - 1))) for _ in range(batch)
        ]
        self._generations = itertools.count(1)

    @property
    def mean_depth(self) -> float:
        return statistics.mean(depth for trace in self.traces for depth in trace[1:])

    def make(self, fixed: bool) -> list[EngineRequest]:
        return [
            EngineRequest(
                generation=Generation(next(self._generations)),
                prompt=prompt,
                sampling=SamplingParams(max_tokens=NEW_TOKENS, seed=0, ignore_eos=True),
                exit=ExitSettings(
                    1.0, 1, LOOPS, "trace", (LOOPS,) * NEW_TOKENS if fixed else trace
                ),
            )
            for prompt, trace in zip(self.prompts, self.traces, strict=True)
        ]


def rate(executor: ThreadExecutor, config: SchedulerConfig, requests: list[EngineRequest]) -> float:
    """Decoded tokens per second while the batch is full: from when all have their first output to
    when one ends."""
    core = EngineCore(executor, config, clock=SystemClock())
    for request in requests:
        core.add_local(request)
    decoding, decoded, started_s, stopped_s = 0, 0, 0.0, 0.0
    while not core.idle():
        events = [event for event in core.step() if isinstance(event, TokensProduced)]
        now_s = time.perf_counter()
        decoding += sum(event.start_index == 0 for event in events)
        if not stopped_s and started_s:
            decoded += len(events)
            if any(event.finish_reason for event in events):
                stopped_s = now_s
                for request in requests:
                    core.cancel(request.generation)
        if not started_s and decoding == len(requests):
            started_s = now_s
        if not core.idle():
            executor.wait(60.0)
    return decoded / (stopped_s - started_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {args.threads} thread(s), {args.device}, {json.dumps(CONFIG)}"
    )
    with tempfile.TemporaryDirectory() as folder:
        decode_speed.random_checkpoint(Path(folder))
        executor = build_executor(
            EngineConfig(
                model=folder,
                dtype="float32",
                device=args.device,
                threads=args.threads,
                num_blocks=args.batch * LOOPS * 6,
                num_slots=args.batch,
                num_receive_slots=0,
            ),
            progress=print,
        )
        try:
            compare(executor, args.batch, args.rounds)
        finally:
            executor.shutdown()


def compare(executor: ThreadExecutor, batch: int, rounds: int) -> None:
    requests = Requests(batch)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    order = list(WAYS)
    for _ in range(rounds):
        for way in order:
            asked = requests.make(fixed=way == "fixed depth")
            rates[way].append(rate(executor, WAYS[way], asked))
        order = [*order[1:], order[0]]
    print(f"batch {batch}, mean depth {requests.mean_depth:.2f}, medians of {rounds} rounds:")
    for way, found in rates.items():
        ratios = [mine / fixed for mine, fixed in zip(found, rates["fixed depth"], strict=True)]
        print(
            f"  {way:22s} {statistics.median(found):8.1f} tokens/s, "
            f"{statistics.median(ratios):.2f} of fixed depth"
        )
    share = statistics.median(rates["refill"]) / statistics.median(rates["no refill"])
    print(f"  refill over no refill {share:.2f}; perfect gain {LOOPS / requests.mean_depth:.2f}")


if __name__ == "__main__":
    main()
