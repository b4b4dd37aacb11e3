"""One worker process of the product: engine, connector and links, driven by one event at a time.

Owns everything of one operating-system process. An event goes in by apply(); what was sent, posted
or found wrong comes out. Decides nothing that a worker decides.
"""

from typing import Any, Literal

import msgspec

from rlt.connector.config import WorkerConfig
from rlt.connector.geometry import PoolDescription
from rlt.connector.messages import Heartbeat, Message, RequestReceived
from rlt.connector.process import WorkerParts
from rlt.connector.worker_connector import WorkerConnector
from rlt.decode.engine import DecodeEngine
from rlt.prefill.engine import PrefillEngine
from rlt.runtime.config import EngineConfig

from ..runtime.simulated_executor import SimulatedExecutor
from .bounds import NUM_LOOPS, Bounds
from .loop import Loop, running
from .memory import Content, WatchedMemory
from .records import NEVER_S, Came, Look
from .wire import WireEnd

STEP_S = 11.0  # longer than SETTLE_S and whatever a worker repeats
TOLD = ("blocks_quarantined",)  # figures of a heartbeat that the coordinator reads


class Clock:
    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        return self._loop.now_s

    def wall_s(self) -> float:
        return 0.0


class QuietExecutor(SimulatedExecutor):
    """Keeps no record of what it ever computed."""

    def submit(self, plan: Any) -> None:
        super().submit(plan)
        self.plans.clear()

    def finish_pass(self) -> None:
        super().finish_pass()
        self.scores.clear()


class WorkerProcess:
    def __init__(self, role: Literal["prefill", "decode"], name: str, bounds: Bounds) -> None:
        self.role, self.name = role, name
        self.loop = Loop(name)
        pool = bounds.prefill if role == "prefill" else bounds.decode
        self.executor = QuietExecutor(
            num_blocks=pool.blocks,
            num_slots=pool.slots,
            num_receive_slots=pool.receive_slots,
            num_loops=NUM_LOOPS,
            block_size=bounds.block_size,
            eager=False,
        )
        with running(self.loop):
            self._build(bounds, pool.blocks)

    def _build(self, bounds: Bounds, num_blocks: int) -> None:
        capabilities = self.executor.capabilities()
        limits = self.executor.admission_limits()
        self.pool = PoolDescription(
            kv_base=1 << 20,
            hidden_base=1 << 30,
            num_blocks=num_blocks,
            hidden_rows=limits.num_slots + limits.num_receive_slots,
            geometry=capabilities.geometry,
        )
        self.wire = WireEnd(self.pool, self.name)
        clock = Clock(self.loop)
        config = WorkerConfig(
            role=self.role,
            worker=self.name.partition(".")[0],
            coordinator="C",
            listen="here",
            engine=EngineConfig(
                model="simulated",
                block_size=bounds.block_size,
                chunk_tokens=bounds.chunk_tokens,
            ),
            transfer_timeout_s=NEVER_S,
            reconnect_s=100 * NEVER_S,
            max_inflight_bytes=bounds.max_inflight_bytes,
            max_quarantined=bounds.max_quarantined,
        )
        connector = WorkerConnector(
            self.wire,
            clock=clock,
            max_inflight_bytes=config.max_inflight_bytes,
            transfer_timeout_s=config.transfer_timeout_s,
        )
        executor: Any = self.executor
        parts = WorkerParts(
            config,
            self.name,
            clock,
            executor,
            connector,
            capabilities.geometry,
            capabilities.model,
        )
        self.engine: Any
        self.engine = (PrefillEngine if self.role == "prefill" else DecodeEngine)(parts)
        self.memory = WatchedMemory(self.executor, self.pool, self.engine._core)
        self.engine._link.connect("C")
        self.loop.settle()

    @property
    def now_s(self) -> float:
        return self.loop.now_s

    # Events

    def apply(self, event: tuple[Any, ...]) -> Came:
        with running(self.loop):
            match event:
                case ("begin",):
                    pass
                case ("hear", str(source), message):
                    self.loop.hear(source, message)
                case ("time",):
                    self.loop.advance(STEP_S)
                case ("late",):
                    for _ in range(3):  # a longer step looks as if the process had stood still
                        self.loop.advance(0.4 * NEVER_S)
                case ("compute",):
                    self._compute()
                case ("ended", int(ticket), error):
                    self.wire.end(ticket, error)
                    self._tick()
                case ("land", str(source), tuple(content), bytes(notice), bool(notify)):
                    self.memory.land(content, notice)
                    if notify:
                        self.wire.notify(source, notice)
                        self._tick()
                case _:
                    raise AssertionError(event)
            return self._came()

    def content(self, entry: int) -> Content:
        return self.memory.content(entry)

    def _tick(self) -> None:
        self.engine._ticker.wake()
        self.loop.settle()

    def _compute(self) -> None:
        """Passes until one of them has led to something that others can notice."""
        while self.executor.pass_queued:
            self.executor.finish_pass()
            self._tick()
            if self.loop.sent or self.wire.posted:
                return

    def _came(self) -> Came:
        sent, self.loop.sent = self.loop.sent, []
        posted, self.wire.posted = self.wire.posted, []
        self.memory.forget()
        self.engine._core.check()
        for _, message in sent:
            if isinstance(message, RequestReceived):
                self.memory.check_received(message.generation)
        return Came(tuple((to, _plain(message)) for to, message in sent), tuple(posted))

    def look(self) -> Look:
        ended = self.engine._link.ended
        return Look(
            computes=self.executor.pass_queued,
            sources=tuple(sorted(self.wire.sources)),
            clean=self.fault_at_rest() is None,
            feared=self.engine.quarantined_from(),
            exit_code=(1 if ended.error else ended.value) if ended.done() else None,
        )

    def fault_at_rest(self) -> str | None:
        """What is held although no request lives; None if nothing is."""
        numbers = self.engine.statistics()
        back = numbers["blocks_free"] + numbers["blocks_quarantined"]
        if back != numbers["blocks_total"]:
            return f"{back} of {numbers['blocks_total']} blocks are free or quarantined"
        capacity, limits = self.executor.capacity(), self.executor.admission_limits()
        receive_slots = capacity.free_receive_slots + numbers["slots_withdrawn"]
        if (capacity.free_slots, receive_slots) != (limits.num_slots, limits.num_receive_slots):
            return f"slots are held: {capacity}, {numbers['slots_withdrawn']} withdrawn"
        quarantined = numbers["blocks_quarantined"] or numbers["slots_withdrawn"]
        if bool(quarantined) != bool(self.engine.quarantined_from()):
            return f"{numbers['blocks_quarantined']} blocks are quarantined for no writer"
        for name in ("live", "sending", "unconfirmed", "handles_in_flight", "writes_queued"):
            if numbers.get(name, 0):
                return f"{name}: {numbers[name]}"
        return None


def _plain(message: Message) -> Message:
    """Without what only people read: it would make equal messages differ."""
    if isinstance(message, Heartbeat):
        told = {name: message.statistics[name] for name in TOLD}
        return msgspec.structs.replace(message, statistics=told)
    if "stamps" in message.__struct_fields__:
        return msgspec.structs.replace(message, stamps=())
    return message
