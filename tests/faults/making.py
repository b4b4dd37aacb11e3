"""Messages made out of bytes, for fuzzing: any type of messages.py, from what a fuzzer draws.

Pure. Made values are of the right type and mostly nonsense; names and generations are often those
that the other side knows. Bytes that are used up draw zeros, so every input ends.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

import msgspec
from msgspec import inspect

from rlt.runtime.types import EngineRequest

INTEGERS = (0, 1, 2, 3, 5, 16, 64, -1, 511, 512, 1 << 31, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
FLOATS = (0.0, 1.0, 0.5, -1.0, 1e-9, 1e300, float("inf"), float("nan"))
STRINGS = ("", "x", "prefill", "decode", "\x00", "é" * 300, "/" * 70)


class Draw:
    """Numbers out of bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> bool:
        return self._at < len(self._data)

    def below(self, limit: int) -> int:
        size = 1 if limit <= 256 else 4
        taken = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(taken, "little") % limit

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[self.below(len(choices))]

    def chance(self, one_in: int) -> bool:
        """False when nothing is left."""
        return self.left and self.below(one_in) == 0

    def rest(self) -> bytes:
        return self._data[self._at :]


@cache
def fields_of(kind: type) -> tuple[inspect.Field, ...]:
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    return described.fields


class Maker:
    """generations, names: what the receiver may know; tests add to them as they go."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.generations: list[int] = [1]
        self.names: list[str] = ["p0-1", "d0-1"]

    def message(self, union: Any) -> Any:
        """Of any type of the union."""
        return self.struct(self.draw.pick(get_args(union) or (union,)))

    def struct(self, kind: type) -> Any:
        made = {}
        for field in fields_of(kind):
            if not field.required and self.draw.chance(3):
                continue
            made[field.name] = self._value(field.type, field.name)
        if isinstance(request := made.get("request"), EngineRequest):
            made["generation"] = request.generation  # a frame that differs is malformed
        return kind(**made)

    def _value(self, kind: inspect.Type, name: str) -> Any:
        match kind:
            case inspect.IntType():
                return self._integer(name)
            case inspect.StrType():
                return self.draw.pick(STRINGS if self.draw.chance(3) else self.names)
            case inspect.FloatType():
                return self.draw.pick(FLOATS)
            case inspect.BoolType():
                return bool(self.draw.below(2))
            case inspect.BytesType():
                return bytes([self.draw.below(256)] * self.draw.below(5))
            case inspect.NoneType():
                return None
            case inspect.LiteralType(values=values):
                return self.draw.pick(values)
            case inspect.EnumType(cls=enum):
                return self.draw.pick(list(enum))
            case inspect.StructType(cls=struct):
                return self.struct(struct)
            case inspect.UnionType(types=types):
                return self._value(self.draw.pick(types), name)
            case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
                return tuple(self._value(item, name) for _ in range(self._length()))
            case inspect.TupleType(item_types=items):
                return tuple(self._value(item, name) for item in items)
            case inspect.DictType(key_type=key, value_type=value):
                pairs = range(self._length())
                return {self._value(key, name): self._value(value, name) for _ in pairs}
            case _:
                raise AssertionError(f"cannot make {kind}")

    def _length(self) -> int:
        return self.draw.pick((0, 1, 1, 1, 2, 2, 3, 4, 70))

    def _integer(self, name: str) -> int:
        known = name in ("generation", "oldest_live", "live") and not self.draw.chance(4)
        return int(self.draw.pick(self.generations if known else INTEGERS))


def twisted(frame: bytes, draw: Draw) -> bytes:
    """The frame with one of its values exchanged, or damaged as bytes."""
    if draw.chance(3):
        damaged = bytearray(frame)
        match draw.below(3):
            case 0:
                return bytes(damaged[: draw.below(len(damaged))])
            case 1:
                damaged[draw.below(len(damaged))] = draw.below(256)
                return bytes(damaged)
            case _:
                return bytes(damaged) + bytes([draw.below(256)])
    tree = msgspec.msgpack.decode(frame)
    _exchange(tree, draw)
    try:
        return msgspec.msgpack.encode(tree)
    except (OverflowError, msgspec.MsgspecError):
        return frame


def _exchange(tree: Any, draw: Draw) -> None:
    """One value somewhere in it."""
    while isinstance(tree, dict | list) and tree:
        key = draw.pick(list(tree)) if isinstance(tree, dict) else draw.below(len(tree))
        if isinstance(tree[key], dict | list) and tree[key] and not draw.chance(4):
            tree = tree[key]
            continue
        tree[key] = draw.pick((*INTEGERS, *FLOATS, *STRINGS, None, [], {}, True))
        return
