"""Copies of whole object graphs, fast: what is frozen is shared, everything else is copied once.

Knows containers, plain and slotted objects, bound methods, and functions that close over objects.
A copy shares no changeable object with its original, or the exploration would mix two histories.
"""

import copy
import enum
import itertools
import logging
import types
from collections import defaultdict, deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec

_SHARED: tuple[type, ...] = (
    *(int, float, complex, str, bytes, bool, type(None), type, enum.Enum, range),
    *(types.ModuleType, logging.Logger, type(NotImplemented), type(Ellipsis)),
)

_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})


class Cloner:
    """One copy of one graph: what was met before is the same object in the copy too."""

    def __init__(self) -> None:
        self._copies: dict[int, Any] = {}
        self._kept: list[Any] = []  # originals, so that no id is used twice

    def clone(self, original: Any) -> Any:
        kind = type(original)
        copier = _COPIERS.get(kind)
        if copier is None:
            copier = _COPIERS[kind] = _copier_for(kind)
        if copier is _same:
            return original
        found = self._copies.get(id(original), self)
        if found is not self:
            return found
        return copier(self, original)

    def keep(self, original: Any, made: Any) -> Any:
        self._copies[id(original)] = made
        self._kept.append(original)
        return made


def clone(original: Any) -> Any:
    return Cloner().clone(original)


def _same(cloner: Cloner, original: Any) -> Any:
    return original


def _dict(cloner: Cloner, original: dict[Any, Any]) -> Any:
    made = cloner.keep(original, type(original).__new__(type(original)))
    if isinstance(original, defaultdict):
        made.default_factory = cloner.clone(original.default_factory)
    for key, value in original.items():
        made[cloner.clone(key)] = cloner.clone(value)
    if (attributes := getattr(original, "__dict__", None)) is not None:
        made.__dict__.update({name: cloner.clone(value) for name, value in attributes.items()})
    return made


def _list(cloner: Cloner, original: list[Any]) -> Any:
    made = cloner.keep(original, type(original)())
    made.extend([cloner.clone(value) for value in original])
    return made


def _set(cloner: Cloner, original: set[Any]) -> Any:
    return cloner.keep(original, type(original)([cloner.clone(value) for value in original]))


def _tuple(cloner: Cloner, original: tuple[Any, ...]) -> Any:
    values = [cloner.clone(value) for value in original]
    if all(new is old for new, old in zip(values, original, strict=True)):
        return original
    if hasattr(original, "_make"):
        return cloner.keep(original, type(original)(*values))
    return cloner.keep(original, tuple(values))


def _deque(cloner: Cloner, original: Any) -> Any:
    made = cloner.keep(original, type(original)(maxlen=original.maxlen))
    made.extend([cloner.clone(value) for value in original])
    return made


def _method(cloner: Cloner, original: types.MethodType) -> Any:
    return types.MethodType(original.__func__, cloner.clone(original.__self__))


def _builtin(cloner: Cloner, original: types.BuiltinMethodType) -> Any:
    owner = original.__self__
    if owner is None or isinstance(owner, types.ModuleType | type):
        return original
    return getattr(cloner.clone(owner), original.__name__)


def _cell(cloner: Cloner, original: types.CellType) -> Any:
    made = cloner.keep(original, types.CellType())
    made.cell_contents = cloner.clone(original.cell_contents)
    return made


def _function(cloner: Cloner, original: types.FunctionType) -> Any:
    if original.__closure__ is None and not original.__defaults__:
        return original
    made = types.FunctionType(
        original.__code__,
        original.__globals__,
        original.__name__,
        cloner.clone(original.__defaults__),
        tuple(cloner.clone(cell) for cell in original.__closure__ or ()),
    )
    made.__kwdefaults__ = original.__kwdefaults__
    return cloner.keep(original, made)


def _partial(cloner: Cloner, original: "partial[Any]") -> Any:
    arguments = [cloner.clone(value) for value in original.args]
    keywords = {name: cloner.clone(value) for name, value in original.keywords.items()}
    return partial(cloner.clone(original.func), *arguments, **keywords)


def _count(cloner: Cloner, original: Any) -> Any:
    return cloner.keep(original, copy.copy(original))


def _object(cloner: Cloner, original: Any) -> Any:
    kind = type(original)
    made = cloner.keep(original, kind.__new__(kind))
    for name in slots_of(kind):
        if hasattr(original, name):
            object.__setattr__(made, name, cloner.clone(getattr(original, name)))
    attributes = getattr(original, "__dict__", None)
    if attributes is not None:
        into, clone = made.__dict__, cloner.clone
        for name, value in attributes.items():
            into[name] = value if type(value) in _PLAIN else clone(value)
    return made


@cache
def slots_of(kind: type) -> list[str]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += (slots,) if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


Copier = Callable[[Cloner, Any], Any]


def _copier_for(kind: type) -> Copier:
    if issubclass(kind, msgspec.Struct):
        return _same if kind.__struct_config__.frozen else _struct
    if issubclass(kind, _SHARED):
        return _same
    for base, copier in _BY_BASE:
        if issubclass(kind, base):
            return copier
    return _object


def _struct(cloner: Cloner, original: Any) -> Any:
    made = cloner.keep(original, copy.copy(original))
    for name in original.__struct_fields__:
        setattr(made, name, cloner.clone(getattr(original, name)))
    return made


_BY_BASE: tuple[tuple[type, Copier], ...] = (
    (dict, _dict),
    (list, _list),
    (set, _set),
    (frozenset, _set),
    (tuple, _tuple),
    (type(itertools.count()), _count),
    (deque, _deque),
    (types.MethodType, _method),
    (types.BuiltinMethodType, _builtin),
    (types.CellType, _cell),
    (types.FunctionType, _function),
    (partial, _partial),
)
_COPIERS: dict[type, Copier] = {}
