"""rlt-ask: one question to a running service, its answer streamed to the terminal.

Uses the client library alone. Exit codes: 0 answered, 1 the request or the connection failed,
2 bad option, no service, or several and none named; 130 interrupted, and the request cancelled.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from ..coordinator.client import Client
from ..coordinator.discovery import discover
from ..runtime.errors import RltError, ServiceUnreachable
from ..runtime.interfaces import Delta
from ..runtime.types import FinishReason
from .parser import Option, build_parser, endpoint, number, whole
from .timeline import draw_events, draw_handoff

ASK = "rlt-ask"
FAILED, NO_SERVICE, INTERRUPTED = 1, 2, 130
CONNECT_S = 10.0
DESCRIPTION = "Ask a running rlt service one question and stream its answer."
_ASK = (ASK,)
_MODELS = "the model's"

TABLE = {
    "service": (
        Option(
            flag="--connect",
            commands=_ASK,
            parse=endpoint,
            shown="$RLT_CONNECT, else the one service of this machine",
            unit="endpoint",
            help="where the service listens for clients",
        ),
        Option(
            flag="--timeout-s",
            commands=_ASK,
            parse=number(0, above=True),
            default=600.0,
            unit="seconds",
            help="longest time for the whole answer",
        ),
    ),
    "answer": (
        Option(
            flag="--max-tokens",
            commands=_ASK,
            parse=whole(1),
            default=256,
            unit="tokens",
            help="longest answer",
        ),
        Option(
            flag="--temperature",
            commands=_ASK,
            parse=number(0),
            default=0.0,
            unit="number",
            help="0 always takes the likeliest token",
        ),
        Option(
            flag="--seed",
            commands=_ASK,
            parse=whole(0),
            shown="drawn by the service",
            unit="number",
            help="of the draws; the same seed gives the same answer",
        ),
        Option(
            flag="--exit-mode",
            commands=_ASK,
            choices=("ouro", "ouro_delayed", "random_lookahead"),
            default="ouro",
            unit="name",
            help="ouro, ouro_delayed (one loop later) or random_lookahead (for experiments)",
        ),
        Option(
            flag="--exit-threshold",
            commands=_ASK,
            parse=number(0, maximum=1),
            shown=_MODELS,
            unit="probability",
            help="a token exits once its exit probability reaches this; 1 runs every loop",
        ),
        Option(
            flag="--min-loops",
            commands=_ASK,
            parse=whole(1),
            shown="2",
            unit="loops",
            help="least loops of a token",
        ),
        Option(
            flag="--max-loops",
            commands=_ASK,
            parse=whole(1),
            shown=_MODELS,
            unit="loops",
            help="most loops of a token after the first",
        ),
        Option(
            flag="--raw",
            commands=_ASK,
            parse=None,
            help="send the text as it is, without the chat template",
        ),
    ),
    "output": (
        Option(flag="--depths", commands=_ASK, parse=None, help="show each token's exit depth"),
        Option(flag="--timeline", commands=_ASK, parse=None, help="draw what happened when"),
        Option(
            flag="--json",
            commands=_ASK,
            parse=None,
            help="print every piece of the answer as a line of JSON, nothing else",
        ),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser(ASK, DESCRIPTION, TABLE)
    parser.add_argument("question", help="what to ask")
    options = parser.parse_args(arguments)
    try:
        address = options.connect or discover()
    except ServiceUnreachable as error:
        print(f"error: {error}", file=sys.stderr)
        return NO_SERVICE
    try:
        with Client(address, timeout_s=min(CONNECT_S, options.timeout_s)) as client:
            return ask(client, options)
    except TimeoutError:
        print(f"\nerror: no full answer within --timeout-s {options.timeout_s:g}", file=sys.stderr)
        return FAILED
    except RltError as error:
        print(f"error: {error.code}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the answer has had enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return FAILED


def ask(client: Client, options: argparse.Namespace) -> int:
    prompt: Any = options.question
    if not options.raw:
        prompt = [{"role": "user", "content": options.question}]
    deltas: list[Delta] = []
    with client.generate(
        prompt,
        stream=True,
        timeout_s=options.timeout_s,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        exit_mode=options.exit_mode,
        exit_threshold=options.exit_threshold,
        min_loops=options.min_loops,
        max_loops=options.max_loops,
    ) as stream:
        for delta in stream:
            deltas.append(delta)
            show_piece(delta, as_json=options.json)
    if not options.json:
        show_end(deltas, depths=options.depths, timeline=options.timeline)
    return 0


def show_piece(delta: Delta, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(delta).decode(), flush=True)
    else:
        print(delta.text, end="", flush=True)


def show_end(deltas: Sequence[Delta], *, depths: bool, timeline: bool) -> None:
    print()
    if deltas[-1].finish_reason is FinishReason.LENGTH:
        print("(cut at --max-tokens)", file=sys.stderr)
    if depths:
        print(depth_line([depth for delta in deltas for depth in delta.exit_depths]))
    if timeline:
        stamps = deltas[-1].timeline
        print("\n".join([*draw_events(stamps), *draw_handoff(stamps)]))


def depth_line(exit_depths: Sequence[int]) -> str:
    """The first token's depth stands apart: it comes from the prompt, which runs every loop."""
    later = exit_depths[1:]
    mean = f", mean {sum(later) / len(later):.2f} after the first" if later else ""
    return f"exit depths: {' '.join(map(str, exit_depths))}{mean}"


if __name__ == "__main__":
    sys.exit(main())
