"""The options of rlt-ask, and which of them say how an answer is generated.

Owns the table alone. A chat changes the same settings with /set, parsed by the same functions.
"""

import argparse
from typing import Any

from .at_service import service_options
from .parser import Option, number, whole

ASK = "rlt-ask"
_ASK = (ASK,)
_MODELS = "the model's"

TABLE = {
    "service": service_options(_ASK, timeout_s=600.0, of="for the whole answer"),
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
        Option(
            flag="--colour",
            commands=_ASK,
            parse=None,
            help="colour the answer by loops per token even if it goes to no terminal",
        ),
    ),
}

SETTINGS = {
    option.attribute: option
    for option in TABLE["answer"]
    if option.parse is not None  # --raw says what a prompt is, not how it is answered
}


def settings_from(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of Client.generate()."""
    return {name: getattr(options, name) for name in SETTINGS}
