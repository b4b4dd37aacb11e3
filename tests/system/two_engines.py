"""A prefill and a decode engine in one process over real NIXL, their messages carried by hand.

The product's own EngineCore, Sender, Receiver and WorkerConnector; only sockets are left out, so
that a test can look into both memories at any moment.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import torch

from rlt.connector.messages import Ack, Chunk, Commit, Stop, WriterEnded
from rlt.connector.nixl_transport import NixlTransport
from rlt.connector.receiver import Receiver
from rlt.connector.sender import Sender
from rlt.connector.transport import Transport
from rlt.connector.worker_connector import WorkerConnector
from rlt.runtime.clock import SystemClock
from rlt.runtime.config import EngineConfig, SchedulerConfig
from rlt.runtime.engine_core import EngineCore
from rlt.runtime.events import EngineEvent, Received, Released, Reservation, TokensProduced
from rlt.runtime.executor import build_executor
from rlt.runtime.types import EngineRequest, Generation, Stamp

from .service import GOLDEN

CANARY = 0xFF  # what free blocks hold where the engine watches them
Wrap = Callable[[Transport], Transport]


def config(**changes: object) -> EngineConfig:
    fields = {"model": str(GOLDEN), "num_blocks": 256, "num_slots": 8, "num_receive_slots": 8}
    return EngineConfig(**{**fields, "threads": 1, **changes})  # type: ignore[arg-type]


class Side:
    """What both engines have: an executor whose memory is filled with the canary, a connector."""

    def __init__(self, name: str, wrap: Wrap, **changes: object) -> None:
        settings = config(**changes)
        self.name = name
        self.clock = SystemClock()
        self.executor = build_executor(settings)
        self.storage = self.executor.storage
        for pool in (self.storage.kv, self.storage.hidden):
            pool.view(torch.uint8).fill_(CANARY)
        self.transport = NixlTransport(
            self.storage.kv, self.storage.hidden, self.storage.geometry, name=name
        )
        self.connector = WorkerConnector(
            wrap(self.transport),
            clock=self.clock,
            max_inflight_bytes=1 << 28,
            transfer_timeout_s=30.0,
        )
        self.settings = settings

    def core(self, connector: Sender | Receiver) -> EngineCore:
        return EngineCore(
            self.executor,
            SchedulerConfig.from_engine(self.settings),
            clock=self.clock,
            scheduler_connector=connector,
            worker_connector=self.connector,
        )


@dataclass
class Outcome:
    """first: index of the first output that is to come."""

    first: int = 0
    token_ids: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    stamps: tuple[Stamp, ...] = ()


class TwoEngines:
    def __init__(self, wrap: Wrap = lambda transport: transport, **changes: object) -> None:
        self.p, self.d = Side("p", wrap, **changes), Side("d", lambda t: t, **changes)
        geometry = self.p.storage.geometry
        self.sender = Sender(
            geometry, self.p.clock, worker="p", drop_queued=self.p.connector.drop_queued
        )
        self.receiver = Receiver(geometry, self.d.clock, worker="d")
        self.p_core, self.d_core = self.p.core(self.sender), self.d.core(self.receiver)
        metadata = self.d.connector.accept_peer(
            "p", self.p.connector.agent_metadata(), self.p.connector.pool
        )
        self.p.connector.add_peer("d", metadata, self.d.connector.pool)
        self.outcomes: dict[Generation, Outcome] = {}
        self.events: list[EngineEvent] = []
        self.on_received: Callable[[Generation], None] = lambda _: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.p_core.shutdown()
        self.d_core.shutdown()
        self.p.connector.close()
        self.d.connector.close()

    def start(self, request: EngineRequest) -> Reservation:
        reservation = self.d_core.reserve(request)
        assert isinstance(reservation, Reservation), reservation
        self.receiver.open(request.generation, "p", reservation, request.context_tokens)
        self.sender.open(request.generation, "d", reservation, request.context_tokens)
        self.p_core.add_prefill(request)
        self.outcomes[request.generation] = Outcome(first=len(request.delivered))
        return reservation

    def step(self) -> None:
        for event in self.p_core.step():
            self._note(event)
        for event in self.d_core.step():
            self._note(event)
            if isinstance(event, Received):
                self.outcomes[event.generation].stamps = self.receiver.take_stamps(event.generation)
                self.on_received(event.generation)
        for _, message in self.sender.take_messages():
            match message:
                case Chunk():
                    self.receiver.on_chunk("p", message)
                case Commit():
                    self.receiver.on_commit("p", message)
                case WriterEnded():
                    self.receiver.on_writer_ended("p", message)
        for _, answer in self.receiver.take_messages():
            match answer:
                case Ack():
                    self.sender.on_ack("d", answer.generation)
                case Stop():
                    self.sender.on_stop("d", answer.generation)
        self.p_core.check()
        self.d_core.check()

    def run(self, requests: list[EngineRequest]) -> list[Outcome]:
        """Everything through both engines until both have let go of all of it."""
        for request in requests:
            self.start(request)
        self.settle()
        return [self.outcomes[request.generation] for request in requests]

    def settle(self) -> None:
        waited = 0
        while not (self.p_core.idle() and self.d_core.idle()):
            self.step()
            waited += not self.rest_a_moment()
            assert waited < 20_000, (self.p_core.live(), self.d_core.live())

    def rest_a_moment(self) -> bool:
        """Sleep until a pass is done, for a millisecond or two at most: a driver that spins takes
        the interpreter from the compute threads. False if no pass was done."""
        return self.p.executor.wait(0.001) or self.d.executor.wait(0.001)

    def _note(self, event: EngineEvent) -> None:
        self.events.append(event)
        if isinstance(event, TokensProduced):
            outcome = self.outcomes[event.generation]
            assert event.start_index == outcome.first + len(outcome.token_ids)
            outcome.token_ids += event.token_ids
            outcome.exit_depths += event.exit_depths
        if isinstance(event, Released):
            assert event.quarantined_blocks == 0
