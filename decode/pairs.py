"""D's side of its pairs: the socket that prefill workers dial, and one NIXL agent for each of them.

Owns the listening socket. A prefill incarnation that the coordinator lists gets an agent of its own
at its first PairHello, and loses it when it is no longer listed; mismatches are refused by name.
Who is not listed gets none: an expelled writer must not come back to memory it could still write.
"""

import logging
from collections.abc import Callable
from typing import assert_never

from ..connector.channel import RouterChannel
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
from ..runtime.errors import ProtocolError

logger = logging.getLogger(__name__)


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
        self.strangers = 0  # hellos of who is not listed (yet): said again, if they are in earnest
        self._channel: RouterChannel[PrefillToDecode, DecodeToPrefill] = RouterChannel(
            PrefillToDecode, self._handle
        )

    def listen(self, endpoint: str) -> str:
        return self._channel.bind(endpoint)

    def send(self, incarnation: str, message: DecodeToPrefill) -> None:
        self._channel.send(incarnation.encode(), message)

    def update(self, peers: tuple[Peer, ...]) -> list[str]:
        """Drop and return the incarnations that were listed once and are not any more."""
        listed = {peer.incarnation for peer in peers}
        gone = sorted(self._listed - listed)
        self._listed = listed
        for incarnation in gone:
            if self._welcomes.pop(incarnation, None):
                self._connector.remove_peer(incarnation)
        return gone

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
            case PairHello() if incarnation in self._listed:
                self.send(incarnation, self._answer(incarnation, message))
            case PairHello():
                self.strangers += 1
            case Chunk() | Commit() | WriterEnded():
                self._on_message(incarnation, message)
            case _:
                assert_never(message)

    def _answer(self, incarnation: str, hello: PairHello) -> PairWelcome | PairRefused:
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
