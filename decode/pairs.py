"""D's side of its pairs: the socket that prefill workers dial, and one NIXL agent for each of them.

Owns the listening socket. A prefill incarnation that the coordinator lists gets an agent of its own
at its first PairHello, and loses it when it is no longer listed, never before: a pair that P opens
anew finds the same agent. Who is not listed gets none, because an expelled writer must not come
back to memory that it could still write; its last hello is remembered, for it may be listed soon.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import assert_never

import msgspec

from ..connector.channel import RouterChannel
from ..connector.codec import encode
from ..connector.messages import (
    PROTOCOL_VERSION,
    Chunk,
    Commit,
    DecodeToPrefill,
    PairHello,
    PairRefused,
    PairWelcome,
    Peer,
    PrefillToDecode,
    WriterEnded,
)
from ..connector.worker_connector import WorkerConnector
from ..runtime.errors import ProtocolError, TransportError

logger = logging.getLogger(__name__)

MOST_STRANGERS = 64  # of whom a hello is remembered
MOST_HELLO_BYTES = 64 << 10  # a real one has less than 2 KB


class PeerChange(msgspec.Struct, frozen=True):
    """Incarnations that were listed and are not any more, and the other way round."""

    gone: tuple[str, ...]
    new: tuple[str, ...]


class PairDesk:
    def __init__(
        self,
        connector: WorkerConnector,
        *,
        incarnation: str,
        fingerprint: str,
        on_message: Callable[[str, Chunk | Commit | WriterEnded], None],
    ) -> None:
        self._connector = connector
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._on_message = on_message
        self._welcomes: dict[str, PairWelcome] = {}
        self._listed: set[str] = set()
        self._excused: set[str] = set()  # of those, whose trouble with the wire was told
        self._hellos: OrderedDict[str, PairHello] = OrderedDict()  # of who is not listed (yet)
        self.strangers = 0  # how many of those there were
        self.refused = 0  # hellos that no honest worker says
        self._channel: RouterChannel[PrefillToDecode, DecodeToPrefill] = RouterChannel(
            PrefillToDecode, self._handle
        )

    def listen(self, endpoint: str) -> str:
        return self._channel.bind(endpoint)

    def send(self, incarnation: str, message: DecodeToPrefill) -> None:
        self._channel.send(incarnation.encode(), message)

    def update(self, peers: tuple[Peer, ...]) -> PeerChange:
        """Drop who is not listed any more; answer who said hello before it was listed."""
        listed = {peer.incarnation for peer in peers}
        gone, new = sorted(self._listed - listed), sorted(listed - self._listed)
        self._listed = listed
        for incarnation in gone:
            if self._welcomes.pop(incarnation, None):
                self._connector.remove_peer(incarnation)
            self._excused.discard(incarnation)
        for incarnation in new:
            if hello := self._hellos.pop(incarnation, None):
                self._answer(incarnation, hello)
        return PeerChange(tuple(gone), tuple(new))

    def listed(self, incarnation: str) -> bool:
        return incarnation in self._listed

    def count(self) -> int:
        return len(self._welcomes)

    @property
    def malformed(self) -> int:
        return self._channel.malformed

    def close(self) -> None:
        self._channel.close()

    def _handle(self, identity: bytes, message: PrefillToDecode) -> None:
        incarnation = identity.decode(errors="replace")
        match message:
            case PairHello() if len(encode(message)) > MOST_HELLO_BYTES:
                self.refused += 1
            case PairHello() if incarnation in self._listed:
                self._answer(incarnation, message)
            case PairHello():
                self._remember(incarnation, message)
            case Chunk() | Commit() | WriterEnded():
                self._on_message(incarnation, message)
            case _:
                assert_never(message)

    def _remember(self, incarnation: str, hello: PairHello) -> None:
        self.strangers += 1
        self._hellos[incarnation] = hello
        self._hellos.move_to_end(incarnation)
        if len(self._hellos) > MOST_STRANGERS:
            self._hellos.popitem(last=False)

    def _answer(self, incarnation: str, hello: PairHello) -> None:
        """Not at all where the wire does not work: the hello comes again."""
        try:
            answer = self._judge(incarnation, hello)
        except TransportError as error:
            if incarnation not in self._excused:
                self._excused.add(incarnation)
                logger.warning("pair with %s does not open yet: %s", hello.worker, error)
        else:
            self._excused.discard(incarnation)
            self.send(incarnation, answer)

    def _judge(self, incarnation: str, hello: PairHello) -> PairWelcome | PairRefused:
        if welcome := self._welcomes.get(incarnation):
            return welcome
        try:
            self._check(incarnation, hello)
            metadata = self._connector.accept_peer(incarnation, hello.agent_metadata, hello.pool)
        except ProtocolError as error:
            logger.error("pair with %s is refused: %s", hello.worker, error)
            return PairRefused(incarnation=self._incarnation, reason=str(error))
        welcome = PairWelcome(
            incarnation=self._incarnation, pool=self._connector.pool, agent_metadata=metadata
        )
        self._welcomes[incarnation] = welcome
        logger.info("pair with %s is ready", hello.worker)
        return welcome

    def _check(self, incarnation: str, hello: PairHello) -> None:
        if hello.incarnation != incarnation:
            raise ProtocolError(f"{hello.incarnation} says hello as {incarnation}")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"{hello.worker} speaks protocol {hello.protocol_version}, not {PROTOCOL_VERSION}"
            )
        if hello.fingerprint != self._fingerprint:
            raise ProtocolError(f"{hello.worker} serves another model: weights fingerprint differs")
