"""Clients that live in the coordinator's own process, beside those that come by ZeroMQ.

Owns the inbox of each. They speak the same messages and are subject to the same rules: a full inbox
makes the outbox hold the rest back, and a client that takes nothing for too long loses its
requests. A closed one hears nothing more and its requests are cancelled.
"""

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from ..connector.channel import SendResult
from ..connector.messages import Alive, ClientToCoordinator, CoordinatorToClient

INBOX = 64  # messages in an inbox before the outbox has to hold the rest

Ask = Callable[[bytes, ClientToCoordinator], None]


class LocalClients:
    """ask: where their messages go. gone: told of each that closes. room: told that an inbox which
    was full has been emptied."""

    def __init__(self, ask: Ask, gone: Callable[[bytes], None], room: Callable[[], None]) -> None:
        self._ask = ask
        self._gone = gone
        self._room = room
        # Clients that come by ZeroMQ name themselves: none may guess the name of a local one.
        self._prefix = secrets.token_hex(16).encode()
        self._numbers = itertools.count(1)
        self._clients: dict[bytes, LocalClient] = {}

    def open(self) -> "LocalClient":
        client = LocalClient(b"%s-%d" % (self._prefix, next(self._numbers)), self)
        self._clients[client.identity] = client
        return client

    def send(self, identity: bytes, message: CoordinatorToClient) -> SendResult:
        client = self._clients.get(identity)
        return client.put(message) if client is not None else SendResult.GONE

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._clients

    def __len__(self) -> int:
        return len(self._clients)

    def ask(self, client: "LocalClient", message: ClientToCoordinator) -> None:
        self._ask(client.identity, message)

    def room(self) -> None:
        self._room()

    def forget(self, client: "LocalClient") -> None:
        if self._clients.pop(client.identity, None) is not None:
            self._gone(client.identity)


class LocalClient:
    """Use it as `with clients.open() as client`."""

    def __init__(self, identity: bytes, clients: LocalClients) -> None:
        self.identity = identity
        self._clients = clients
        self._inbox: deque[CoordinatorToClient] = deque()
        self._arrived = asyncio.Event()
        self.closed = False

    def ask(self, message: ClientToCoordinator) -> None:
        self._clients.ask(self, message)

    async def take(self) -> list[CoordinatorToClient]:
        """All that has come since the last call; waits until there is something. Empty: closed."""
        while not self._inbox and not self.closed:
            self._arrived.clear()
            await self._arrived.wait()
        taken = list(self._inbox)
        self._inbox.clear()
        if len(taken) >= INBOX:
            self._clients.room()
        return taken

    def put(self, message: CoordinatorToClient) -> SendResult:
        if isinstance(message, Alive):  # this process knows that it lives
            return SendResult.SENT
        if len(self._inbox) >= INBOX:
            return SendResult.FULL
        self._inbox.append(message)
        self._arrived.set()
        return SendResult.SENT

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._inbox.clear()
            self._arrived.set()
            self._clients.forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
