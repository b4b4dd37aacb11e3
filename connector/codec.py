"""Bytes to messages and back: msgpack, decoded by type against one union.

A decoder accepts exactly the messages of its direction; everything else is MalformedFrame.
"""

from typing import Any, Generic, TypeVar

import msgspec

from ..runtime.errors import ProtocolError

In = TypeVar("In")

MAX_FRAME_BYTES = 64 << 20  # far above any legal message
MAX_REQUEST_BYTES = 8 << 20  # of a client's messages: a 1M-token prompt is about 5 MB

_encoder = msgspec.msgpack.Encoder()


class MalformedFrame(ProtocolError):
    """A frame is too large, is not msgpack, or is not a message of this direction."""

    code = "malformed_frame"


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


class Decoder(Generic[In]):
    """Decodes frames of one direction. `union` is one of the unions in messages.py."""

    def __init__(self, union: Any, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(union)
        self._max_bytes = max_bytes

    def decode(self, frame: bytes | memoryview) -> In:
        size = len(frame)
        if size > self._max_bytes:
            raise MalformedFrame(f"frame of {size} bytes is over the limit of {self._max_bytes}")
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise MalformedFrame(str(error)) from error
