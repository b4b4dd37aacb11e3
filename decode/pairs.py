"""D's side of its pairs: the socket that prefill workers dial, and one NIXL agent for each of them.

Owns the listening socket. A prefill incarnation gets its own agent at its first PairHello and loses
it when the coordinator no longer lists it; mismatches are refused by name.
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
            case PairHello():
                self.send(incarnation, self._answer(incarnation, message))
            case Chunk() | Commit() | WriterEnded():
                self._on_message(incarnation, message)
            case _:
                assert_never(message)

    def _answer(self, incarnation: str, hello: PairHello) -> PairWelcome | PairRefused:
        if welcome := self._welcomes.get(incarnation):
            return welcome
        try:
            self._check(hello)
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

    def _check(self, hello: PairHello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"{hello.worker} speaks protocol {hello.protocol_version}, not {PROTOCOL_VERSION}"
            )
        if hello.fingerprint != self._fingerprint:
            raise ProtocolError(f"{hello.worker} serves another model: weights fingerprint differs")
