"""The words and options of rlt-ctl, and the parser made of them. Owns the table alone."""

import argparse

from .at_service import service_options
from .parser import Option, Parser, add_options

CTL = "rlt-ctl"
STATUS, DRAIN, RESTART = f"{CTL} status", f"{CTL} drain", f"{CTL} restart"
ALL = (STATUS, DRAIN, RESTART)
DESCRIPTION = "Look at a running rlt service, and take its workers out of it in order."
WHAT_IT_DOES = {
    STATUS: "show every worker, and what waits and runs",
    DRAIN: "let a worker finish what it has, give it nothing new, then end it for good",
    RESTART: "let workers finish what they have, then start them again; no request fails by it",
}

TABLE = {
    "service": service_options(ALL, timeout_s=120.0, of="to wait for one worker"),
    "what to do": (
        Option(
            flag="--all",
            commands=(RESTART,),
            parse=None,
            help="every worker, one after another, each once the one before is back",
        ),
        Option(
            flag="--wait",
            commands=(DRAIN, RESTART),
            parse=None,
            help="return when the worker is gone, or back with all its pairs",
        ),
        Option(
            flag="--json",
            commands=(STATUS,),
            parse=None,
            help="print everything that the service tells as one line of JSON",
        ),
    ),
}


def build_ctl_parser() -> argparse.ArgumentParser:
    parser = Parser(prog=CTL, description=DESCRIPTION, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for command in ALL:
        name = command.removeprefix(f"{CTL} ")
        action = actions.add_parser(
            name, help=WHAT_IT_DOES[command], description=WHAT_IT_DOES[command], allow_abbrev=False
        )
        if command != STATUS:
            action.add_argument(
                "worker",
                nargs="?" if command == RESTART else None,
                metavar="WORKER",
                help="its name, as `rlt-ctl status` shows it",
            )
        add_options(action, command, TABLE)
    return parser


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = build_ctl_parser()
    options = parser.parse_args(arguments)
    if options.action == "restart" and options.all is (options.worker is not None):
        parser.error("restart needs the name of one worker, or --all")
    return options
