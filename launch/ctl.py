"""rlt-ctl: what a running service looks like, and its workers drained or restarted in order.

Uses the client library alone. Exit codes: 0 done, 1 refused, failed or not done in time, 2 bad
option, no service, or several and none named; 130 interrupted (the service goes on with it).
"""

import argparse
import os
import sys
from collections.abc import Sequence

import msgspec

from ..coordinator.client import Client
from ..coordinator.discovery import discover
from ..runtime.errors import RltError, ServiceUnreachable
from .ctl_options import parse
from .rolling import Operator
from .service_view import draw_status, view_of

FAILED, NO_SERVICE, INTERRUPTED = 1, 2, 130
CONNECT_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(None if arguments is None else list(arguments))
    try:
        address = options.connect or discover()
    except ServiceUnreachable as error:
        print(f"error: {error}", file=sys.stderr)
        return NO_SERVICE
    try:
        with Client(address, timeout_s=min(CONNECT_S, options.timeout_s)) as client:
            act(client, options)
    except TimeoutError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except RltError as error:
        print(f"error: {error.code}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the table has had enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return FAILED
    return 0


def act(client: Client, options: argparse.Namespace) -> None:
    operator = Operator(client, timeout_s=options.timeout_s, say=_say)
    match options.action:
        case "status" if options.json:
            print(msgspec.json.encode(client.stats()).decode())
        case "status":
            print("\n".join(draw_status(client.endpoint, view_of(client.stats()))), flush=True)
        case "drain":
            operator.drain(options.worker, wait=options.wait)
        case "restart" if options.all:
            names = [row.worker for row in operator.view().workers]
            operator.restart(names, wait=True)
        case "restart":
            operator.restart([options.worker], wait=options.wait)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
