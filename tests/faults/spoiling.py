"""Bad frames beside good ones: cut, random, oversized, of another direction, replayed, stale.

What a relay sends besides the frame that came, on the same connection and under the same identity.
Seeded, so that it can be run again; remembers frames of the past to replay them. None is a lie: a
well-formed message whose blocks, counts or live generation are false only its own sender could
tell from a true one.
"""

import random
from collections import Counter, deque

import msgspec

from rlt.connector.codec import MAX_FRAME_BYTES, Decoder, MalformedFrame
from rlt.connector.messages import (
    CoordinatorToSupervisor,
    CoordinatorToWorker,
    DecodeToPrefill,
    PrefillToDecode,
    SupervisorToCoordinator,
    WorkerToCoordinator,
)

from .making import Draw, twisted
from .rules import Letter, To

REMEMBERED = 200
OVERSIZED = MAX_FRAME_BYTES + 1  # libzmq takes it as the end of the connection
FATAL = {"shutdown", "register_refused", "expel", "drain_worker"}  # who hears these must obey
EPOCHS = 1000 << 40  # generations of so many: one that far is another service's, or long gone
HEARD: dict[To, Decoder[msgspec.Struct]] = {
    "coordinator": Decoder(WorkerToCoordinator | SupervisorToCoordinator),
    "worker": Decoder(CoordinatorToWorker | CoordinatorToSupervisor),
    "decode": Decoder(PrefillToDecode),
    "prefill": Decoder(DecodeToPrefill),
}


class Spoiler:
    """Called with each frame that passes; the bad ones that go before it. rate: how often any."""

    def __init__(self, seed: int, rate: float = 0.3) -> None:
        self._random = random.Random(seed)
        self._rate = rate
        self._past: dict[str, deque[Letter]] = {}
        self.sent: Counter[str] = Counter()
        self.oversize: set[To] = set()  # to whom one frame of more bytes than any may have

    def __call__(self, passing: Letter) -> list[bytes]:
        past = self._past.setdefault(passing.to, deque(maxlen=REMEMBERED))
        past.append(passing)
        if passing.to in self.oversize:
            self.oversize.remove(passing.to)
            return [bytes(OVERSIZED)]
        if self._random.random() >= self._rate:
            return []
        kind = self._random.choice(("cut", "random", "damaged", "stray", "replayed", "stale"))
        frame = self._bad(kind, passing)
        if frame is None or kind_of(frame) in FATAL:
            return []
        self.sent[f"{kind} to {passing.to}"] += 1
        return [frame]

    def _bad(self, kind: str, passing: Letter) -> bytes | None:
        frame, draw = passing.frame, self._random
        match kind:
            case "cut":
                return frame[: draw.randrange(len(frame))]
            case "random":
                return draw.randbytes(draw.choice((0, 1, 20, 2000)))
            case "damaged":
                return _unreadable(twisted(frame, Draw(draw.randbytes(40))), passing.to)
            case "stray":
                others = [to for to in self._past if to != passing.to]
                return draw.choice(self._past[draw.choice(others)]).frame if others else None
            case "replayed":
                mine = [old for old in self._past[passing.to] if old.route == passing.route]
                return draw.choice(mine).frame
            case _:
                return _stale(frame, draw)


def _unreadable(frame: bytes, to: To) -> bytes | None:
    try:
        HEARD[to].decode(frame)
    except MalformedFrame:
        return frame
    return None


def _stale(frame: bytes, draw: random.Random) -> bytes | None:
    """The same of a generation long gone, or far from being given. Of work only the former: a
    coordinator that gives it out gives it a number of its own."""
    message = msgspec.msgpack.decode(frame)
    if not isinstance(message, dict) or not isinstance(message.get("generation"), int):
        return None
    older, newer = max(0, message["generation"] - EPOCHS), message["generation"] + EPOCHS
    if isinstance(message.get("request"), dict):
        message["generation"] = message["request"]["generation"] = older
    else:
        message["generation"] = draw.choice((older, newer))
    return msgspec.msgpack.encode(message)


def kind_of(frame: bytes) -> str:
    try:
        message = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, RecursionError):
        return ""
    return str(message.get("type")) if isinstance(message, dict) else ""
