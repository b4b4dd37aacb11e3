"""rlt-ask: one question to a running service, or a chat with it, streamed to the terminal.

Uses the client library alone. Exit codes: 0 answered, 1 the request or the connection failed,
2 bad option, no service, or several and none named; 130 interrupted, and the request cancelled.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from ..coordinator.client import Client
from ..runtime.interfaces import Delta
from .answer import AnswerWriter, show_end
from .ask_options import ASK, TABLE, settings_from
from .at_service import at_service
from .chat import Chat, run_chat
from .depth_colours import wants_colour
from .parser import build_parser

DESCRIPTION = "Ask a running rlt service one question, or chat with it, and stream the answers."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser(ASK, DESCRIPTION, TABLE)
    parser.add_argument("question", nargs="?", help="what to ask; without one, chat")
    options = parser.parse_args(arguments)
    if options.question is None and not sys.stdin.isatty():
        options.question = sys.stdin.read()
    if options.question is None and (options.json or options.raw):
        parser.error("argument --json/--raw: needs a question")
    return at_service(
        options, lambda client: (chat if options.question is None else ask)(client, options)
    )


def ask(client: Client, options: argparse.Namespace) -> int:
    prompt: Any = options.question
    if not options.raw:
        prompt = [{"role": "user", "content": options.question}]
    writer = AnswerWriter(sys.stdout, colour=wants_colour(sys.stdout, forced=options.colour))
    deltas: list[Delta] = []
    try:
        with client.generate(
            prompt, stream=True, timeout_s=options.timeout_s, **settings_from(options)
        ) as stream:
            for delta in stream:
                deltas.append(delta)
                if options.json:
                    print(msgspec.json.encode(delta).decode(), flush=True)
                else:
                    writer.piece(delta)
    except TimeoutError:
        print(file=sys.stderr)  # behind what there is of the answer
        raise TimeoutError(f"no full answer within --timeout-s {options.timeout_s:g}") from None
    if not options.json:
        writer.end()
        show_end(deltas, depths=options.depths, timeline=options.timeline)
    return 0


def chat(client: Client, options: argparse.Namespace) -> int:
    return run_chat(
        Chat(
            client,
            settings_from(options),
            colour=wants_colour(sys.stdout, forced=options.colour),
            timeout_s=options.timeout_s,
            depths=options.depths,
            timeline=options.timeline,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
