"""What a frame must not say: the decoder takes no message that contradicts itself."""

import msgspec
import pytest

from rlt.connector.codec import Decoder, MalformedFrame, encode
from rlt.connector.messages import CoordinatorToWorker, Prefill, Reserve
from rlt.runtime.events import Reservation
from rlt.runtime.types import (
    AllocationId,
    EngineRequest,
    ExitSettings,
    Generation,
    SamplingParams,
)

REQUEST = EngineRequest(
    generation=Generation(5),
    prompt=(1, 2),
    sampling=SamplingParams(),
    exit=ExitSettings(1.0, 1, 4),
)
RESERVATION = Reservation(allocation=AllocationId(1), tables=((0,),), hidden_slot=0)


@pytest.mark.parametrize(
    "message",
    [
        Reserve(generation=Generation(5), request=REQUEST, prefill="p"),
        Prefill(generation=Generation(5), request=REQUEST, decode="d", reservation=RESERVATION),
    ],
    ids=["reserve", "prefill"],
)
def test_a_request_under_two_numbers_is_malformed(message: CoordinatorToWorker) -> None:
    """Else an engine computes what its connector does not know, and never lets go of it."""
    decoder: Decoder[CoordinatorToWorker] = Decoder(CoordinatorToWorker)
    frame = encode(message)
    assert decoder.decode(frame) == message
    twisted = {**msgspec.msgpack.decode(frame), "generation": 6}
    with pytest.raises(MalformedFrame, match="generation 6"):
        decoder.decode(msgspec.msgpack.encode(twisted))
