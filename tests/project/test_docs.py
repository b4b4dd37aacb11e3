"""Pages that describe code are compared with it."""

import re
import typing

import pytest

from rlt.connector import messages
from rlt.launch import ctl_options
from rlt.launch.options import TABLE
from rlt.launch.parser import Option

from .test_imports import ROOT

UNIONS = [
    messages.ClientToCoordinator,
    messages.CoordinatorToClient,
    messages.WorkerToCoordinator,
    messages.CoordinatorToWorker,
    messages.PrefillToDecode,
    messages.DecodeToPrefill,
    messages.WorkerExited | messages.Register,
]
MESSAGES = {kind for union in UNIONS for kind in typing.get_args(union)}
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("kind", sorted(MESSAGES, key=lambda kind: kind.__name__))
def test_protocol_md_names_every_message_with_its_fields(kind: type[messages.Message]) -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    fields = ", ".join(kind.__struct_fields__) or "-"
    assert f"| {kind.__name__} | {fields} |" in text


def option_row(option: Option) -> str:
    """The row of operations.md that describes this option."""
    unit = "switch" if option.parse is None else option.unit
    default = "off" if option.parse is None else option.shown or option.real_default
    shown = "required" if option.required else str(default).replace("|", "or")
    return f"| `{option.flag}` | {unit} | {shown} | {option.help} |"


@pytest.mark.parametrize(
    "option",
    [o for table in (TABLE, ctl_options.TABLE) for options in table.values() for o in options],
    ids=lambda option: option.flag,
)
def test_operations_md_has_the_row_of_every_option(option: Option) -> None:
    assert option_row(option) in (ROOT / "docs" / "operations.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_every_file_that_a_page_names_exists(page: typing.Any) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:[a-z]+/)+[a-z_]+\.(?:py|md))`", text):
        assert (ROOT / path).exists(), path
