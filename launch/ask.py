"""rlt-ask: one question to a running service, or a chat with it, streamed to the terminal.

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
from .answer import AnswerWriter, show_end
from .ask_options import ASK, TABLE, settings_from
from .chat import Chat, run_chat
from .depth_colours import wants_colour
from .parser import build_parser

FAILED, NO_SERVICE, INTERRUPTED = 1, 2, 130
CONNECT_S = 10.0
DESCRIPTION = "Ask a running rlt service one question, or chat with it, and stream the answers."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser(ASK, DESCRIPTION, TABLE)
    parser.add_argument("question", nargs="?", help="what to ask; without one, chat")
    options = parser.parse_args(arguments)
    if options.question is None and not sys.stdin.isatty():
        options.question = sys.stdin.read()
    if options.question is None and (options.json or options.raw):
        parser.error("argument --json/--raw: needs a question")
    try:
        address = options.connect or discover()
    except ServiceUnreachable as error:
        print(f"error: {error}", file=sys.stderr)
        return NO_SERVICE
    try:
        with Client(address, timeout_s=min(CONNECT_S, options.timeout_s)) as client:
            return ask(client, options) if options.question is not None else chat(client, options)
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
    writer = AnswerWriter(sys.stdout, colour=wants_colour(sys.stdout, forced=options.colour))
    deltas: list[Delta] = []
    with client.generate(
        prompt, stream=True, timeout_s=options.timeout_s, **settings_from(options)
    ) as stream:
        for delta in stream:
            deltas.append(delta)
            if options.json:
                print(msgspec.json.encode(delta).decode(), flush=True)
            else:
                writer.piece(delta)
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
