"""Grade-school word problems with worked solutions: an endless corpus, free of licences.

Every number stays between 0 and 99. The draws of one seed are part of the embedded model's recipe:
changing their order changes what "never seen in training" means.
"""

import random
from typing import NamedTuple

NAMES = (
    "Ana Ben Cal Dee Eli Fay Gus Hal Ida Jon Kim Leo Mia Ned Ola Pam Quin Ray Sue Tom Uma Vic Wes "
    "Yan Zoe"
).split()
THINGS = (
    "apples books coins cards shells stamps marbles pencils cookies stones tickets flowers eggs "
    "keys balls hats"
).split()
PLACES = (
    "at the shop",
    "in the park",
    "at school",
    "by the river",
    "in the attic",
    "at the fair",
    "under the bed",
    "on the bus",
)
MOST = 99


class Problem(NamedTuple):
    question: str
    solution: str  # the worked steps and "The answer is N."
    answer: int


class _Story:
    """A word problem under way: the sentences so far, the sums so far, the number reached."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._name, self._thing = rng.choice(NAMES), rng.choice(THINGS)
        self._total = rng.randint(1, 60)
        self._sentences = [
            rng.choice(
                [
                    f"{self._name} has {self._total} {self._thing}.",
                    f"{self._name} starts with {self._total} {self._thing}.",
                    f"There are {self._total} {self._thing} in the box of {self._name}.",
                ]
            )
        ]
        self._work: list[str] = []

    def step(self) -> None:
        """Double, take away or add; nothing where the number leaves no room."""
        kind = self._rng.choices(["add", "subtract", "double"], [5, 4, 1])[0]
        if kind == "double" and self._total * 2 <= MOST:
            self._double()
        elif kind == "subtract" and self._total > 1:
            self._subtract()
        elif self._total < MOST - 1:
            self._add()

    def finish(self) -> Problem | None:
        """The problem, or None if no step found room."""
        if not self._work:
            return None
        question = self._rng.choice(
            [
                f"How many {self._thing} does {self._name} have?",
                f"How many {self._thing} are left?",
                f"How many {self._thing} now?",
            ]
        )
        text = " ".join([*self._sentences, question])
        solution = " ".join([*self._work, f"The answer is {self._total}."])
        return Problem(text, solution, self._total)

    def _double(self) -> None:
        self._tell(
            f"Then {self._name} doubles the {self._thing}.",
            f"{self._name} gets as many {self._thing} again.",
        )
        self._sum("+", self._total, self._total * 2)

    def _subtract(self) -> None:
        count = self._rng.randint(1, self._total - 1)
        other = self._rng.choice(NAMES)
        self._tell(
            f"{self._name} gives {count} {self._thing} to {other}.",
            f"{self._name} loses {count} {self._thing} {self._rng.choice(PLACES)}.",
            f"{other} takes {count} of the {self._thing}.",
            f"{self._name} sells {count} {self._thing}.",
        )
        self._sum("-", count, self._total - count)

    def _add(self) -> None:
        count = self._rng.randint(1, min(60, MOST - self._total))
        other = self._rng.choice(NAMES)
        self._tell(
            f"{self._name} finds {count} more {self._thing} {self._rng.choice(PLACES)}.",
            f"{other} gives {self._name} {count} {self._thing}.",
            f"{self._name} buys {count} {self._thing}.",
            f"{self._name} wins {count} {self._thing} {self._rng.choice(PLACES)}.",
        )
        self._sum("+", count, self._total + count)

    def _tell(self, *ways: str) -> None:
        self._sentences.append(self._rng.choice(ways))

    def _sum(self, sign: str, count: int, result: int) -> None:
        self._work.append(f"{self._total} {sign} {count} = {result}.")
        self._total = result


def word_problem(rng: random.Random, max_steps: int = 4) -> Problem:
    while True:
        story = _Story(rng)
        for _ in range(rng.randint(1, max_steps)):
            story.step()
        problem = story.finish()
        if problem is not None:
            return problem


def arithmetic(rng: random.Random) -> Problem:
    first = rng.randint(0, MOST)
    if rng.random() < 0.55:
        second = rng.randint(0, MOST - first)
        task, result = f"{first} + {second}", first + second
    else:
        second = rng.randint(0, first)
        task, result = f"{first} - {second}", first - second
    question = rng.choice([f"What is {task}?", f"Compute {task}.", f"{task} ="])
    return Problem(question, f"{task} = {result}. The answer is {result}.", result)


def sample(rng: random.Random) -> Problem:
    """One problem of the mixture that the embedded model was trained on."""
    return arithmetic(rng) if rng.random() < 0.25 else word_problem(rng)
