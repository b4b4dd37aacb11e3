"""What a process of the explored world tells of one event, and of itself. Frozen records."""

from typing import Any

import msgspec

from .wire import Posted

NEVER_S = 1e9


class Broken(Exception):
    """A property does not hold."""


class Look(msgspec.Struct, frozen=True):
    """What the world may know of a process without asking it."""

    computes: bool = False
    sources: tuple[str, ...] = ()  # whom an agent faces here
    clean: bool = True  # holds nothing of any request, but for what is quarantined
    feared: tuple[str, ...] = ()  # whose writes keep memory in quarantine
    exit_code: int | None = None


class Came(msgspec.Struct, frozen=True):
    """What one event gave: messages by receiver, WRITEs posted."""

    sent: tuple[tuple[str, Any], ...] = ()
    posted: tuple[Posted, ...] = ()
