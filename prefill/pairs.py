"""P's side of its pairs: one dialled socket per decode worker, and the exchange that opens it.

Owns the sockets to decode workers. A pair is ready once both sides know each other's pool and the
worker connector holds the peer; until then nothing is sent to it. One that stops working is closed,
and opened anew once every WRITE that was posted there has ended.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import assert_never

from ..connector.channel import DealerChannel
from ..connector.messages import (
    Ack,
    DecodeToPrefill,
    PairClosed,
    PairHello,
    PairReady,
    PairRefused,
    PairWelcome,
    Peer,
    PrefillToDecode,
    Stop,
)
from ..connector.worker_connector import WorkerConnector
from ..runtime.errors import ConfigError, RltError, TransportError

logger = logging.getLogger(__name__)

REPEAT_S = 0.5  # an unanswered PairHello is sent again after this
MOST_REASON = 1000  # characters of a decode worker's word that are passed on


class Pair:
    """One decode worker, dialled."""

    def __init__(
        self, peer: Peer, channel: DealerChannel[DecodeToPrefill, PrefillToDecode]
    ) -> None:
        self.peer = peer
        self.channel = channel
        self.ready = False
        self.matched = False  # it was ready once: what fails now may work later
        self.refused: str | None = None  # for good: why
        self.excused = False  # it was told why the pair does not open yet


class PairBook:
    def __init__(
        self,
        hello: Callable[[], PairHello],
        connector: WorkerConnector,
        *,
        incarnation: str,
        on_message: Callable[[str, Ack | Stop], None],
        report: Callable[[PairReady | PairClosed], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._hello = hello
        self._connector = connector
        self._incarnation = incarnation
        self._on_message = on_message
        self._report = report
        self._pairs: dict[str, Pair] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def update(self, peers: tuple[Peer, ...]) -> list[str]:
        """Dial new decode workers; drop and return those that are gone."""
        known = {peer.incarnation for peer in peers}
        gone = [incarnation for incarnation in self._pairs if incarnation not in known]
        for incarnation in gone:
            self._drop(incarnation)
        for peer in peers:
            if peer.incarnation not in self._pairs:
                self._dial(peer)
        return gone

    def ready(self, incarnation: str) -> bool:
        pair = self._pairs.get(incarnation)
        return pair is not None and pair.ready

    def send(self, incarnation: str, message: PrefillToDecode) -> None:
        if pair := self._pairs.get(incarnation):
            pair.channel.send(message)

    def break_off(self, incarnation: str, reason: str) -> None:
        """The pair does not work: nothing goes there until it was opened anew."""
        if not self.ready(incarnation):
            return
        pair = self._pairs[incarnation]
        pair.ready = False
        logger.warning("pair with %s is closed: %s", pair.peer.worker, reason)
        self._connector.remove_peer(incarnation)
        self._report(PairClosed(decode=incarnation, reason=reason))
        self._hello_later(incarnation)

    def open_pairs(self) -> tuple[str, ...]:
        return tuple(incarnation for incarnation, pair in self._pairs.items() if pair.ready)

    def report_again(self) -> None:
        """To a coordinator that is new."""
        for incarnation in self.open_pairs():
            self._report(PairReady(decode=incarnation))
        self.report_refusals()

    def report_refusals(self) -> None:
        """Again: heartbeats tell of open pairs only."""
        for incarnation, pair in self._pairs.items():
            if pair.refused is not None:
                self._report(PairClosed(decode=incarnation, reason=pair.refused, refused=True))

    def count(self) -> int:
        return sum(pair.ready for pair in self._pairs.values())

    def malformed(self) -> int:
        return sum(pair.channel.malformed for pair in self._pairs.values())

    def close(self) -> None:
        for incarnation in list(self._pairs):
            self._drop(incarnation)

    def _dial(self, peer: Peer) -> None:
        channel: DealerChannel[DecodeToPrefill, PrefillToDecode] = DealerChannel(
            DecodeToPrefill,
            lambda message: self._handle(peer.incarnation, message),
            identity=self._incarnation.encode(),
        )
        self._pairs[peer.incarnation] = Pair(peer, channel)
        try:
            channel.connect(peer.endpoint)
        except ConfigError as error:
            self._refused(peer.incarnation, str(error))
        else:
            self._say_hello(peer.incarnation)

    def _say_hello(self, incarnation: str) -> None:
        pair = self._pairs[incarnation]
        if pair.ready or pair.refused is not None:
            return
        try:
            if not self._connector.draining(incarnation):
                pair.channel.send(self._hello())
        except TransportError as error:
            self._not_yet(pair, error)
        self._hello_later(incarnation)

    def _hello_later(self, incarnation: str) -> None:
        if timer := self._timers.get(incarnation):
            timer.cancel()
        self._timers[incarnation] = self._loop.call_later(REPEAT_S, self._say_hello, incarnation)

    def _handle(self, incarnation: str, message: DecodeToPrefill) -> None:
        match message:
            case PairWelcome() | PairRefused() if not self._awaited(incarnation, message):
                pass
            case PairWelcome():
                self._welcomed(incarnation, message)
            case PairRefused():
                self._refused(incarnation, message.reason)
            case Ack() | Stop():
                self._on_message(incarnation, message)
            case _:
                assert_never(message)

    def _awaited(self, incarnation: str, answer: PairWelcome | PairRefused) -> bool:
        """Not so: the answer to a hello that was said again; or of another incarnation, which
        listens now where that one did."""
        pair = self._pairs[incarnation]
        waits = not pair.ready and pair.refused is None
        return (
            waits
            and answer.incarnation == incarnation
            and not self._connector.draining(incarnation)
        )

    def _welcomed(self, incarnation: str, welcome: PairWelcome) -> None:
        pair = self._pairs[incarnation]
        try:
            self._connector.add_peer(incarnation, welcome.agent_metadata, welcome.pool)
        except RltError as error:
            if pair.matched or isinstance(error, TransportError):
                self._not_yet(pair, error)
            else:
                self._refused(incarnation, str(error))
            return
        pair.ready = pair.matched = True
        pair.excused = False
        logger.info("pair with %s is ready", pair.peer.worker)
        self._report(PairReady(decode=incarnation))

    def _not_yet(self, pair: Pair, error: RltError) -> None:
        """The next hello tries again; one line tells of all of them."""
        if not pair.excused:
            pair.excused = True
            logger.warning("pair with %s does not open yet: %s", pair.peer.worker, error)

    def _refused(self, incarnation: str, reason: str) -> None:
        pair = self._pairs[incarnation]
        pair.refused = reason = reason[:MOST_REASON]
        logger.error("pair with %s is refused: %s", pair.peer.worker, reason)
        self._report(PairClosed(decode=incarnation, reason=reason, refused=True))

    def _drop(self, incarnation: str) -> None:
        pair = self._pairs.pop(incarnation)
        if timer := self._timers.pop(incarnation, None):
            timer.cancel()
        pair.channel.close()
        if pair.ready:
            self._connector.remove_peer(incarnation)
