"""make demo: one prefill and one decode process, three word problems, streamed answers.

Ends with exit code 0 only if all answers are right and the service stopped in order.
"""

import sys
import time
from collections.abc import Sequence

from ..coordinator.client import Client
from ..runtime.errors import RltError
from ..runtime.interfaces import Delta
from .answer import depth_line
from .running import running_service
from .timeline import draw_handoff

QUESTIONS = (
    ("Ana has 17 apples. Ben gives Ana 25 apples. How many apples does Ana have?", 42),
    (
        "Tom starts with 60 coins. Tom loses 14 coins in the park. Tom buys 9 coins. "
        "How many coins are left?",
        55,
    ),
    (
        "There are 12 books in the box of Mia. Then Mia doubles the books. Mia sells 5 books. "
        "How many books now?",
        19,
    ),
)


def main() -> int:
    started_s = time.monotonic()
    print("Starting a coordinator, one prefill and one decode process ...", flush=True)
    try:
        with running_service(["--log-level", "warning"]) as service:
            print(f"Ready after {time.monotonic() - started_s:.1f} s.\n", flush=True)
            with Client(service.endpoint) as client:
                right = sum(_answers(client, *question) for question in QUESTIONS)
    except RltError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{right} of {len(QUESTIONS)} answers are right; everything is stopped.")
    return 0 if right == len(QUESTIONS) else 1


def _answers(client: Client, question: str, answer: int) -> bool:
    print(f"Q: {question}\nA: ", end="", flush=True)
    deltas = _stream(client, question)
    print()
    print(depth_line([depth for delta in deltas for depth in delta.exit_depths]))
    print("\n".join(draw_handoff(deltas[-1].timeline)) + "\n", flush=True)
    text = "".join(delta.text for delta in deltas)
    return text.strip().endswith(f"The answer is {answer}.")


def _stream(client: Client, question: str) -> Sequence[Delta]:
    deltas = []
    with client.generate([{"role": "user", "content": question}], stream=True) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
            deltas.append(delta)
    return deltas


if __name__ == "__main__":
    sys.exit(main())
