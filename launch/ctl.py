"""rlt-ctl: what a running service looks like, and its workers drained or restarted in order.

Uses the client library alone. Exit codes: 0 done, 1 refused, failed or not done in time, 2 bad
option, no service, or several and none named; 130 interrupted (the service goes on with it).
"""

import argparse
import sys
from collections.abc import Sequence

import msgspec

from ..coordinator.client import Client
from .at_service import at_service
from .ctl_options import parse
from .rolling import Operator
from .service_view import draw_status, view_of


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(None if arguments is None else list(arguments))
    return at_service(options, lambda client: act(client, options))


def act(client: Client, options: argparse.Namespace) -> int:
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
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
