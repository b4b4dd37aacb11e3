"""argparse made from an option table: units and defaults in --help, one-line errors.

Owns how an option is shown, read and refused. Knows no option by name.
"""

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option. `sets` names the config record and field that its value goes to; the default is
    that field's unless given here. shown: the default in words, where it is a rule. parse None: a
    switch. `commands`: which commands have it."""

    flag: str
    commands: tuple[str, ...]
    help: str
    parse: Callable[[str], Any] | None = str
    unit: str = ""
    sets: tuple[type[msgspec.Struct], str] | None = None
    default: Any = None
    shown: str = ""
    choices: tuple[str, ...] = ()
    repeat: bool = False
    required: bool = False

    @property
    def attribute(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def real_default(self) -> Any:
        if self.sets is None or self.default is not None:
            return self.default
        record, name = self.sets
        (value,) = (f.default for f in msgspec.structs.fields(record) if f.name == name)
        return None if value is msgspec.NODEFAULT else value


def whole(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        return value

    return parse


def number(
    minimum: float, *, above: bool = False, maximum: float = math.inf
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not math.isfinite(value) or value < minimum or (above and value == minimum):
            bound = f"above {minimum:g}" if above else f"at least {minimum:g}"
            raise argparse.ArgumentTypeError(f"must be {bound}, got {text}")
        if value > maximum:
            raise argparse.ArgumentTypeError(f"must be at most {maximum:g}, got {text}")
        return value

    return parse


def on_off(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return text == "on"


def endpoint(text: str) -> str:
    scheme, _, rest = text.partition("://")
    if scheme not in ("ipc", "tcp") or not rest or (scheme == "tcp" and ":" not in rest):
        raise argparse.ArgumentTypeError(f"{text!r} is neither ipc://PATH nor tcp://HOST:PORT")
    return text


def checkpoint_dir(text: str) -> str:
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a checkpoint folder: it has no config.json"
        )
    return str(Path(text).absolute())


def existing_file(text: str) -> str:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file")
    return str(Path(text).absolute())


class Parser(argparse.ArgumentParser):
    """An error is one line that names the option; exit code 2."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace("unrecognized arguments:", "no option")
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def build_parser(
    command: str, description: str, table: Mapping[str, Sequence[Option]]
) -> argparse.ArgumentParser:
    """table: options under the headings of --help; those of other commands are left out."""
    parser = Parser(prog=command, description=description, allow_abbrev=False)
    add_options(parser, command, table)
    return parser


def add_options(
    parser: argparse.ArgumentParser, command: str, table: Mapping[str, Sequence[Option]]
) -> None:
    for heading, options in table.items():
        group = parser.add_argument_group(heading)
        for option in options:
            if command in option.commands:
                _add(group, option)


def _add(group: Any, option: Option) -> None:
    default = option.real_default
    if option.parse is None:
        group.add_argument(
            option.flag, action="store_true", help=f"{option.help} [switch; default: off]"
        )
        return
    shown = "required" if option.required else f"default: {option.shown or default}"
    group.add_argument(
        option.flag,
        type=option.parse,
        default=None if option.repeat else default,
        choices=option.choices or None,
        required=option.required,
        action="append" if option.repeat else "store",
        metavar=option.unit.upper() if option.unit in _NAMED else "VALUE",
        help=f"{option.help} [{option.unit}; {shown}]".replace("%", "%%"),
    )


_NAMED = ("endpoint", "folder", "name")


def values_for(
    record: type[msgspec.Struct],
    arguments: argparse.Namespace,
    table: Mapping[str, Sequence[Option]],
) -> dict[str, Any]:
    """What the command line says about the fields of `record`; an option that this command lacks
    says nothing."""
    return {
        option.sets[1]: getattr(arguments, option.attribute)
        for options in table.values()
        for option in options
        if option.sets is not None and option.sets[0] is record
        if hasattr(arguments, option.attribute)
    }


def spell_options(message: str, table: Mapping[str, Sequence[Option]]) -> str:
    """A config record's complaint, with its fields named as the command line names them."""
    for options in table.values():
        for option in options:
            if option.sets is not None and "_" in option.sets[1]:
                message = re.sub(rf"(?<![-\w]){option.sets[1]}\b", option.flag, message)
    return message
