"""What of an object graph can make a difference later, as a digest: equal digest, equal future.

Left out is what is only looked at (counters, stamps, stories) and how it is wired. A time counts as
"to come", "now" or "past", because each step of time in the exploration is longer than every
interval that it may end.
"""

import enum
import hashlib
import itertools
import logging
import marshal
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from rlt.connector.asks import AskBook
from rlt.coordinator.deadlines import Deadlines
from rlt.coordinator.dispatch import Dispatcher
from rlt.coordinator.history import History
from rlt.coordinator.observer import Unobserved
from rlt.coordinator.supervisors import _Supervisor
from rlt.coordinator.timeline import Timeline
from rlt.runtime.intake import Intake
from rlt.runtime.story import Story

from .cloning import slots_of
from .loop import Handle, Loop

# Never part of what decides: figures for people, and times of the wall clock.
ONLY_LOOKED_AT = frozenset(
    {
        *("counters", "_counters", "_counts", "_late", "late", "repeats", "malformed", "strangers"),
        *("served", "bypasses", "statistics", "stamps", "_stamps", "timeline", "refusals"),
        *("evictions", "_wrong_role", "_notifications_received", "_numbers", "number", "scores"),
        *("_notifications_malformed", "_observer", "_story", "_history", "_looked_s", "plans"),
        *("first_output_s", "last_output_s", "received_s", "_submissions", "_progress_s"),
        *("registration", "_registration", "_config", "config", "clock", "_clock"),
        *("_sequence", "_arrivals", "_prompt_passes", "_serial", "changes", "_epoch", "_now"),
        *("instance", "_last_error"),
    }
)
WIRING = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinMethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
    logging.Logger,
    type,
    itertools.count,
    Story,
    History,
    Timeline,
    Unobserved,
)


_TIMES = frozenset({int, float})
_PLAIN = frozenset({int, str, bytes, bool, type(None)})


class Canon:
    """Digests of many graphs that share frozen records."""

    def __init__(self) -> None:
        self._records: dict[Any, int] = {}

    def digest(self, root: Any, now_s: float) -> bytes:
        walk = _Walk(self._records, now_s)
        walk.value(root)
        return hashlib.blake2b(marshal.dumps(walk.tokens, 2), digest_size=16).digest()

    def tokens(self, root: Any, now_s: float) -> list[Any]:
        """For looking at what tells two graphs apart."""
        walk = _Walk(self._records, now_s)
        walk.value(root)
        return walk.tokens


class _Walk:
    def __init__(self, records: dict[Any, int], now_s: float) -> None:
        self._records = records
        self._now_s = now_s
        self._seen: dict[int, int] = {}
        self.tokens: list[Any] = []

    def value(self, value: Any) -> None:
        kind = type(value)
        writer = _WRITERS.get(kind)
        if writer is None:
            writer = _WRITERS[kind] = _writer_for(kind)
        writer(self, value)

    def named(self, name: str, value: Any) -> None:
        kind = type(value)
        if kind in _TIMES and name.endswith("_s"):
            self.tokens.append((value > self._now_s) - (value < self._now_s))
        elif kind in _PLAIN:
            self.tokens.append(value)
        else:
            self.value(value)

    def again(self, value: Any) -> bool:
        """Whether it was met before; else it is from now on."""
        number = self._seen.get(id(value))
        if number is None:
            self._seen[id(value)] = len(self._seen)
            return False
        self.tokens.append(("seen", number))
        return True

    def record(self, value: Any) -> None:
        try:
            self.tokens.append(self._records.setdefault(value, len(self._records)))
        except TypeError:  # holds a dict
            self.tokens.append(repr(value))


def _atom(walk: _Walk, value: Any) -> None:
    walk.tokens.append(value)


def _enum(walk: _Walk, value: enum.Enum) -> None:
    walk.tokens.append(value.name)


def _nothing(walk: _Walk, value: Any) -> None:
    pass


def _record(walk: _Walk, value: Any) -> None:
    walk.record(value)


def _dict(walk: _Walk, value: dict[Any, Any]) -> None:
    if walk.again(value):
        return
    walk.tokens.append(-len(value) - 1)
    for key, held in value.items():
        walk.value(key)
        walk.value(held)


def _sequence(walk: _Walk, value: Any) -> None:
    if walk.again(value):
        return
    walk.tokens.append(-len(value) - 1)
    for held in value:
        walk.value(held)


def _tuple(walk: _Walk, value: tuple[Any, ...]) -> None:
    walk.tokens.append(-len(value) - 1)
    for held in value:
        walk.value(held)


def _set(walk: _Walk, value: Any) -> None:
    if all(isinstance(held, str | int) for held in value):
        walk.tokens.append(tuple(sorted(value, key=str)))
    else:
        walk.tokens.append(tuple(sorted(repr(held) for held in value)))


def _object(walk: _Walk, value: Any) -> None:
    if walk.again(value):
        return
    walk.tokens.append(type(value).__name__)
    for name in slots_of(type(value)):
        if name not in ONLY_LOOKED_AT and hasattr(value, name):
            walk.named(name, getattr(value, name))
    for name, held in getattr(value, "__dict__", {}).items():
        if name not in ONLY_LOOKED_AT:
            walk.named(name, held)


def _asks(walk: _Walk, value: AskBook[Any]) -> None:
    """Whatever is open is due after the next step of time; how often it was asked counts little."""
    for key in value:
        walk.value(key)
        walk.tokens.append(min(value.tries(key), 4))


def _handle(walk: _Walk, value: Handle) -> None:
    walk.tokens.append(getattr(value.callback, "__qualname__", ""))
    walk.value(value.args)


def _dispatcher(walk: _Walk, value: Any) -> None:
    """Whether it has seen the last change, not how many there were."""
    if not walk.again(value):
        changes = (value._registry.changes, value._books.changes)
        walk.tokens.append(value._offered_at == changes)
        for name, held in value.__dict__.items():
            if name not in ("_offered_at", *ONLY_LOOKED_AT):
                walk.named(name, held)


def _intake(walk: _Walk, value: Any) -> None:
    if not walk.again(value):
        walk.tokens.append(value._blocked_at == value._epochs())
        for name, held in value.__dict__.items():
            if name not in ("_blocked_at", *ONLY_LOOKED_AT):
                walk.named(name, held)


def _loop(walk: _Walk, value: Loop) -> None:
    for held in (value.dealers, value._timers):
        walk.value(held)


def _supervisor(walk: _Walk, value: Any) -> None:
    """The one memory of time that outlasts a step."""
    walk.tokens.append(round(min(walk._now_s - value.heard_s, 12.0)))
    walk.value(value.children)


Writer = Callable[[_Walk, Any], None]


def _writer_for(kind: type) -> Writer:
    if kind in _SPECIAL:
        return _SPECIAL[kind]
    if issubclass(kind, msgspec.Struct):
        return _record if kind.__struct_config__.frozen else _object
    if issubclass(kind, enum.Enum):
        return _enum
    if kind in (int, float, str, bytes, bool, type(None)):
        return _atom
    if issubclass(kind, WIRING):
        return _nothing
    for base, writer in (
        (dict, _dict),
        ((list, deque), _sequence),
        (tuple, _tuple),
        ((set, frozenset), _set),
    ):
        if issubclass(kind, base):  # type: ignore[arg-type]
            return writer
    return _object


_SPECIAL: dict[type, Writer] = {
    AskBook: _asks,
    Deadlines: _nothing,
    Handle: _handle,
    Dispatcher: _dispatcher,
    Intake: _intake,
    _Supervisor: _supervisor,
    Loop: _loop,
}
_WRITERS: dict[type, Writer] = {}
