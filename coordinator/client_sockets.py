"""The sockets that clients connect to, and which of them each client came by.

Owns the listeners and the table of known clients. A client is known from its first message until it
is forgotten; nothing can be sent to one that is not known.
"""

from collections.abc import Callable

from ..connector.channel import RouterChannel, SendResult
from ..connector.codec import MAX_REQUEST_BYTES
from ..connector.messages import ClientToCoordinator, CoordinatorToClient

HIGH_WATER = 1000  # frames on their way to one client before its backlog starts
RECEIVE_HIGH_WATER = 64  # of one client, read and not handled yet: beyond that, it has to wait

Channel = RouterChannel[ClientToCoordinator, CoordinatorToClient]


class ClientSockets:
    def __init__(self, on_message: Callable[[bytes, ClientToCoordinator], None]) -> None:
        self._on_message = on_message
        self._channels: list[Channel] = []
        self._came_by: dict[bytes, Channel] = {}

    def bind(self, endpoint: str) -> str:
        """Listen there, too. Returns the real address."""

        def hear(client: bytes, message: ClientToCoordinator) -> None:
            self._came_by[client] = channel
            self._on_message(client, message)

        channel: Channel = RouterChannel(
            ClientToCoordinator,
            hear,
            high_water=HIGH_WATER,
            receive_high_water=RECEIVE_HIGH_WATER,
            max_bytes=MAX_REQUEST_BYTES,
        )
        self._channels.append(channel)
        return channel.bind(endpoint)

    def send(self, client: bytes, message: CoordinatorToClient) -> SendResult:
        channel = self._came_by.get(client)
        return channel.send(client, message) if channel is not None else SendResult.GONE

    def forget(self, client: bytes) -> None:
        self._came_by.pop(client, None)

    def known(self) -> tuple[bytes, ...]:
        return tuple(self._came_by)

    @property
    def malformed(self) -> int:
        return sum(channel.malformed for channel in self._channels)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
