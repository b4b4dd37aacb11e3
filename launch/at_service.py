"""A terminal program at a running service: how it finds it, and the exit code that it ends with.

Exit codes: what the program returns, 1 the request or the connection failed, 2 no service, or
several and none named; 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Callable

from ..coordinator.client import Client
from ..coordinator.discovery import discover
from ..runtime.errors import RltError, ServiceUnreachable
from .parser import Option, endpoint, number

FAILED, NO_SERVICE, INTERRUPTED = 1, 2, 130
CONNECT_S = 10.0


def service_options(commands: tuple[str, ...], *, timeout_s: float, of: str) -> tuple[Option, ...]:
    """of: what takes that long."""
    return (
        Option(
            flag="--connect",
            commands=commands,
            parse=endpoint,
            shown="$RLT_CONNECT, else the one service of this machine",
            unit="endpoint",
            help="where the service listens for clients",
        ),
        Option(
            flag="--timeout-s",
            commands=commands,
            parse=number(0, above=True),
            default=timeout_s,
            unit="seconds",
            help=f"longest time {of}",
        ),
    )


def at_service(options: argparse.Namespace, use: Callable[[Client], int]) -> int:
    """use: returns the exit code, or raises; its TimeoutError says of what."""
    try:
        address = options.connect or discover()
    except ServiceUnreachable as error:
        print(f"error: {error}", file=sys.stderr)
        return NO_SERVICE
    try:
        with Client(address, timeout_s=min(CONNECT_S, options.timeout_s)) as client:
            return use(client)
    except TimeoutError as error:
        print(f"error: {error}", file=sys.stderr)
    except RltError as error:
        print(f"error: {error.code}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has had enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
    return FAILED
