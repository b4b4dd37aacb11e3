"""Messages for fuzzers, as sockets would give them: through the codec, perhaps damaged."""

from typing import Any

from rlt.connector import messages
from rlt.connector.codec import Decoder, MalformedFrame, encode

from .making import Maker, twisted

STEPS = 60  # of one input, so that each ends soon
UNIONS = {
    "client to coordinator": messages.ClientToCoordinator,
    "coordinator to client": messages.CoordinatorToClient,
    "worker to coordinator": messages.WorkerToCoordinator | messages.SupervisorToCoordinator,
    "coordinator to worker": messages.CoordinatorToWorker,
    "coordinator to supervisor": messages.CoordinatorToSupervisor,
    "prefill to decode": messages.PrefillToDecode,
    "decode to prefill": messages.DecodeToPrefill,
}
_DECODERS: dict[str, Decoder[Any]] = {name: Decoder(union) for name, union in UNIONS.items()}


def decode(direction: str, frame: bytes) -> Any:
    """The message, or None where the frame is none."""
    try:
        return _DECODERS[direction].decode(frame)
    except MalformedFrame:
        return None


def heard(maker: Maker, direction: str) -> Any:
    """A message as it would come out of a socket: made, sometimes twisted on the way."""
    try:
        frame = encode(maker.message(UNIONS[direction]))
    except OverflowError:
        return None
    return decode(direction, twisted(frame, maker.draw) if maker.draw.chance(3) else frame)
