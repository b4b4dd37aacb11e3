"""Scores exact answers on generated problems, at one or several exit settings, with the mean depth.

    python tools/accuracy.py                                   # the embedded model, in this process
    python tools/accuracy.py --max-loops 4 3 2 --threshold 1   # fixed depths
    python tools/accuracy.py --threshold 0.9 0.7 0.5 --min-loops 1 2
    python tools/accuracy.py --mode ouro ouro_delayed --threshold 0.5 --min-loops 1
    python tools/accuracy.py --connect ipc:///tmp/.../client.sock

Every combination of the four lists is run on the same problems. Their seed is not one that the
training used. The mean depth leaves out first tokens, which always run every loop.
"""

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from problems import Problem, sample

from rlt.runtime.interfaces import ChatMessage, Frontend, GenerateRequest
from rlt.runtime.types import ExitParams, FinishReason, RequestId, SamplingParams

EMBEDDED = Path(__file__).parents[1] / "launch" / "embedded"
TRAINING_SEEDS = (1, 7, 999)
LONGEST_ANSWER = 80  # tokens
BAR = 30


@dataclass
class Score:
    right: int = 0
    loops: int = 0  # over all tokens but the first of each answer
    tokens: int = 0
    seconds: float = 0.0

    @property
    def mean_loops(self) -> float:
        return self.loops / max(1, self.tokens)


def score(frontend: Frontend, problems: list[Problem], setting: ExitParams, at_once: int) -> Score:
    """Ask all problems, at most `at_once` at a time."""
    result = Score()
    texts: dict[RequestId, str] = {}
    waiting = iter(enumerate(problems))
    started_s = time.monotonic()
    for number, problem in itertools.islice(waiting, at_once):
        frontend.submit(_request(number, problem, setting))
    done = 0
    while done < len(problems):
        for delta in frontend.outputs():
            texts[delta.request_id] = texts.get(delta.request_id, "") + delta.text
            depths = delta.exit_depths[1:] if delta.start_index == 0 else delta.exit_depths
            result.loops += sum(depths)
            result.tokens += len(depths)
            if delta.finish_reason is None:
                continue
            if delta.finish_reason is FinishReason.ERROR:
                raise SystemExit(f"error: {delta.error_code}: {delta.error}")
            answer = problems[int(delta.request_id)].answer
            result.right += texts[delta.request_id].strip().endswith(f"The answer is {answer}.")
            done += 1
            _show_progress(done, len(problems), result.right)
            for number, problem in itertools.islice(waiting, 1):
                frontend.submit(_request(number, problem, setting))
    result.seconds = time.monotonic() - started_s
    return result


def _request(number: int, problem: Problem, setting: ExitParams) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(str(number)),
        messages=(ChatMessage(role="user", content=problem.question),),
        sampling=SamplingParams(max_tokens=LONGEST_ANSWER),
        exit=setting,
    )


def _show_progress(done: int, total: int, right: int) -> None:
    if sys.stderr.isatty() or done == total:
        filled = BAR * done // total
        end = "\n" if done == total else ""
        bar = "#" * filled + "." * (BAR - filled)
        print(f"\r[{bar}] {done}/{total}, {right} right", end=end, file=sys.stderr, flush=True)


@contextmanager
def frontend_for(options: argparse.Namespace) -> Iterator[Frontend]:
    if options.connect:
        from rlt.coordinator.client import Client

        with closing(Client(options.connect)) as client:
            yield client
    else:
        with local_engine(options.model, options.threads, options.dtype) as engine:
            yield engine


@contextmanager
def local_engine(
    model: Path, threads: int | None = None, dtype: Literal["auto", "float32", "bfloat16"] = "auto"
) -> Iterator[Frontend]:
    from rlt.coordinator.text import CheckpointTokenizer
    from rlt.runtime.config import EngineConfig
    from rlt.runtime.local import LocalEngine

    config = EngineConfig(model=str(model), threads=threads, dtype=dtype, device="auto")
    with LocalEngine(config, tokenizer=CheckpointTokenizer(model)) as engine:
        yield engine


def problems_of(seed: int, count: int) -> list[Problem]:
    rng = random.Random(seed)
    return [sample(rng) for _ in range(count)]


def settings_for(options: argparse.Namespace) -> list[ExitParams]:
    return [
        ExitParams(exit_mode=mode, exit_threshold=threshold, min_loops=least, max_loops=most)
        for mode in options.mode
        for most in options.max_loops
        for threshold in options.threshold
        for least in options.min_loops
        if least is None or most is None or least <= most
    ]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Score exact answers on generated problems.")
    add = parser.add_argument
    add("--problems", type=int, default=40, help="how many (default: 40)")
    add("--seed", type=int, default=2024, help="of the problems (default: 2024)")
    add(
        "--mode",
        nargs="+",
        default=["ouro"],
        choices=("ouro", "ouro_delayed", "random_lookahead"),
        help="exit modes (default: ouro)",
    )
    add(
        "--threshold",
        type=float,
        nargs="+",
        default=[None],
        help="exit thresholds, 0 to 1; 1 is fixed depth (default: the checkpoint's)",
    )
    add("--min-loops", type=int, nargs="+", default=[None], help="least loops (default: 2)")
    add(
        "--max-loops", type=int, nargs="+", default=[None], help="most loops (default: the model's)"
    )
    add("--at-once", type=int, default=16, help="problems that run at once (default: 16)")
    add("--connect", help="address of a running service (default: an engine in this process)")
    add("--model", type=Path, default=EMBEDDED, help="checkpoint (default: the embedded one)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="(default: auto)")
    add("--threads", type=int, help="CPU threads (default: torch's)")
    options = parser.parse_args()
    if options.seed in TRAINING_SEEDS:
        parser.error(f"--seed {options.seed} was used in training; choose another")
    return options


def main() -> None:
    options = read_options()
    problems = problems_of(options.seed, options.problems)
    print(f"{len(problems)} problems of seed {options.seed}")
    print(
        f"{'mode':16} {'threshold':>9} {'min':>4} {'max':>4} {'right':>9} {'mean loops':>10} "
        f"{'tokens/s':>9}"
    )
    with frontend_for(options) as frontend:
        for setting in settings_for(options):
            result = score(frontend, problems, setting, options.at_once)
            values = (setting.exit_threshold, setting.min_loops, setting.max_loops)
            threshold, least, most = ("-" if value is None else value for value in values)
            right = f"{result.right}/{len(problems)}"
            speed = (result.tokens + len(problems)) / result.seconds
            print(
                f"{setting.exit_mode:16} {threshold:>9} {least:>4} {most:>4} {right:>9} "
                f"{result.mean_loops:>10.2f} {speed:>9.0f}"
            )


if __name__ == "__main__":
    main()
