"""Writes docs/accuracy.md and docs/accuracy.svg: exact answers against loops at every exit setting.

    python tools/accuracy_table.py                  # 200 problems per setting
    python tools/accuracy_table.py --problems 1000

Everything in those two files comes from here; nothing in them is written by hand. All settings
answer the same problems, whose seed was not used in training.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from accuracy import EMBEDDED, TRAINING_SEEDS, Score, local_engine, problems_of, score
from plot import Axis, Point, Series, svg

from rlt.runtime.types import ExitParams

DOCS = Path(__file__).parents[1] / "docs"
THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LOOPS = 4
PAGE = """# Accuracy against loops

The embedded model solves generated word problems with worked steps. An answer is right if its last
sentence gives the right number. Every setting answered the same {problems} problems, greedily;
their seed, {seed}, was not used in training. Mean loops leave out first tokens, which come from the
prompt and always have all {loops}. Made by:

    make accuracy-table      # python tools/accuracy_table.py --problems {problems} --seed {seed}

![Exact answers against mean loops](accuracy.svg)

Labels are the number of loops (`fixed`) or the threshold; where there is no room they are left out.

| setting | threshold | right | share | mean loops |
|---|---|---|---|---|
{rows}

`fixed` runs every token through the same number of loops. `ouro` leaves a loop once the exit
probability so far reaches the threshold; `ouro_delayed` leaves one loop later, so that the next
loop may be submitted before the score is read.
"""


@dataclass(frozen=True)
class Setting:
    name: str
    label: str  # of its point
    exit: ExitParams


def settings() -> list[Setting]:
    fixed = [
        Setting("fixed", f"{n}", ExitParams(exit_threshold=1.0, min_loops=1, max_loops=n))
        for n in range(1, LOOPS + 1)
    ]
    gated = [
        Setting(
            f"{mode}, min_loops {least}",
            f"{threshold}",
            ExitParams(exit_mode=mode, exit_threshold=threshold, min_loops=least),
        )
        for mode, least in (("ouro", 1), ("ouro", 2), ("ouro_delayed", 1), ("ouro_delayed", 2))
        for threshold in THRESHOLDS
    ]
    return fixed + gated


def row(setting: Setting, result: Score, problems: int) -> str:
    name, threshold = setting.name, setting.label
    if name == "fixed":
        name, threshold = f"fixed {setting.label}", "-"
    share = f"{100 * result.right / problems:.1f} %"
    return f"| {name} | {threshold} | {result.right} | {share} | {result.mean_loops:.2f} |"


def series(results: dict[Setting, Score], problems: int) -> list[Series]:
    names = dict.fromkeys(setting.name for setting in results)
    return [
        Series(
            name,
            [
                Point(result.mean_loops, 100 * result.right / problems, setting.label)
                for setting, result in results.items()
                if setting.name == name
            ],
        )
        for name in names
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=200, help="(default: 200)")
    parser.add_argument("--seed", type=int, default=2024, help="of the problems (default: 2024)")
    parser.add_argument("--at-once", type=int, default=64, help="(default: 64)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    options = parser.parse_args()
    if options.seed in TRAINING_SEEDS:
        parser.error(f"--seed {options.seed} was used in training; choose another")
    problems = problems_of(options.seed, options.problems)
    results = {}
    with local_engine(EMBEDDED, options.threads) as engine:
        for setting in settings():
            print(f"{setting.name}, {setting.label}", file=sys.stderr)
            results[setting] = score(engine, problems, setting.exit, options.at_once)
    rows = [row(setting, result, len(problems)) for setting, result in results.items()]
    print("\n".join(rows))
    page = PAGE.format(problems=len(problems), seed=options.seed, loops=LOOPS, rows="\n".join(rows))
    (DOCS / "accuracy.md").write_text(page)
    plot = svg(
        f"Exact answers of {len(problems)}, against mean loops per token",
        Axis("mean loops per token", 0.5, LOOPS + 0.5, 0.5),
        Axis("right, %", 0.0, 100.0, 20.0),
        series(results, len(problems)),
    )
    (DOCS / "accuracy.svg").write_text(plot)


if __name__ == "__main__":
    main()
