"""Scripted workers: they speak the coordinator's protocol and compute nothing.

Token k of a request is (sum of its prompt + k) modulo the vocabulary, at depth 1 + k modulo R, so a
test knows what a client must get. A pair of them hands over by a plain call.
"""

from dataclasses import dataclass, field

from rlt.connector.geometry import PoolDescription
from rlt.connector.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Confirm,
    CoordinatorToWorker,
    Drain,
    DrainTo,
    GenerationFailed,
    GenerationReleased,
    Heartbeat,
    LiveGeneration,
    MustWait,
    Output,
    OutputRow,
    PairClosed,
    PairReady,
    Peers,
    Prefill,
    PrefillAccepted,
    PrefillComplete,
    Refused,
    Register,
    RegisterAgain,
    RegisterRefused,
    RequestActivated,
    RequestReceived,
    Resend,
    Reserve,
    Reserved,
    Shutdown,
    Welcome,
    WorkerToCoordinator,
)
from rlt.runtime.events import Reservation
from rlt.runtime.interfaces import AdmissionLimits
from rlt.runtime.types import (
    AllocationId,
    EngineRequest,
    FinishReason,
    Generation,
    KVGeometry,
    ModelDescription,
    Stamp,
    TokenLogprobs,
)

VOCAB = 512
DEPTHS = 4
MODEL = ModelDescription(
    name="scripted",
    fingerprint="f",
    vocab_size=VOCAB,
    max_positions=1024,
    num_loops=DEPTHS,
    eos_token_ids=(2,),
    default_exit_threshold=0.5,
)
GEOMETRY = KVGeometry(
    num_layers=1,
    num_depths=DEPTHS,
    num_kv_heads=1,
    head_dim=8,
    hidden_size=8,
    block_size=16,
    dtype="float32",
)


def expected_tokens(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    return tuple((sum(prompt) + index) % VOCAB for index in range(max_tokens))


def expected_depths(max_tokens: int) -> tuple[int, ...]:
    return tuple(DEPTHS if index == 0 else 1 + index % DEPTHS for index in range(max_tokens))


@dataclass
class _Record:
    request: EngineRequest
    peer: str
    phase: str
    outputs: int = 0


@dataclass
class ScriptedWorker:
    name: str
    role: str
    num_blocks: int = 4096
    num_receive_slots: int = 8
    num_slots: int = 8
    model: ModelDescription = MODEL
    geometry: KVGeometry = GEOMETRY
    life: int = 1
    refuses_pairs: bool = False
    refuses_never: bool = False  # what does not fit has to wait
    burst: int = 1  # tokens of one step
    says: tuple[int, ...] | None = None  # what every request gets instead of expected_tokens()
    ended: bool = False  # it was refused: a real one exits
    stopped: bool = False  # as by SIGSTOP
    feared: tuple[str, ...] = ()
    quarantined: int = 0  # blocks
    draining: bool = False  # it wants to end, as after SIGTERM
    drain: DrainTo | None = None  # what the coordinator drains it to
    shutdown: Shutdown | None = None  # what it was told
    welcome_epoch: int = 0
    pairs: set[str] = field(default_factory=set)  # a prefill worker's, by incarnation
    dull: bool = False  # it does not fail by itself what a dead peer has left
    highest_epoch: int = 0
    peers: Peers | None = None
    welcome: Welcome | None = None
    live: dict[Generation, _Record] = field(default_factory=dict)
    closed: set[Generation] = field(default_factory=set)
    log: dict[Generation, list[OutputRow]] = field(default_factory=dict)
    heard: list[CoordinatorToWorker] = field(default_factory=list)

    @property
    def incarnation(self) -> str:
        return f"{self.name}-{self.life}"

    @property
    def pid(self) -> int:
        return 1_000_000 + self.life

    def register(self) -> Register:
        slots = self.num_receive_slots if self.role == "decode" else 0
        return Register(
            worker=self.name,
            incarnation=self.incarnation,
            role=self.role,
            pid=self.pid,
            protocol_version=PROTOCOL_VERSION,
            model=self.model,
            pool=PoolDescription(
                kv_base=1 << 20,
                hidden_base=1 << 40,
                num_blocks=self.num_blocks,
                hidden_rows=self.num_slots + slots,
                geometry=self.geometry,
            ),
            limits=AdmissionLimits(
                num_blocks=self.num_blocks,
                num_slots=self.num_slots,
                num_receive_slots=slots,
                max_positions=self.model.max_positions,
            ),
            peer_endpoint="ipc:///nowhere" if self.role == "decode" else "",
            highest_epoch=self.highest_epoch,
            drain=self.drain,
        )

    def heartbeat(self) -> Heartbeat:
        live = [LiveGeneration(g, r.phase, r.outputs) for g, r in self.live.items()]
        live += [
            LiveGeneration(g, "unconfirmed", rows[-1].start_index + len(rows[-1].token_ids))
            for g, rows in self.log.items()
            if g not in self.live
        ]
        version = self.peers.version if self.peers is not None else 0
        return Heartbeat(
            peers_version=version,
            live=tuple(live),
            statistics={"beats": 1.0, "blocks_quarantined": float(self.quarantined)},
            draining=self.draining,
            quarantined_from=self.feared,
            pairs=tuple(sorted(self.pairs)) if self.role == "prefill" else None,
        )

    def handle(self, message: CoordinatorToWorker) -> list[WorkerToCoordinator]:
        self.heard.append(message)
        if self.ended:
            return []
        match message:
            case RegisterRefused():
                self.ended = True
                self.live.clear()
                self.log.clear()
            case Welcome():
                new = self.welcome_epoch not in (0, message.epoch)
                self.welcome, self.welcome_epoch = message, message.epoch
                self.highest_epoch = max(self.highest_epoch, message.epoch)
                if new:  # the coordinator is
                    self.closed.update(self.live)
                    self.live.clear()
                    self.log.clear()
                    self.peers = None
                    return [PairReady(decode=decode) for decode in sorted(self.pairs)]
            case RegisterAgain():
                self.welcome = None
                return [self.register()]
            case Drain():
                self.drain = message.to
            case Shutdown():
                self.shutdown = message
            case Peers():
                self.peers = message
                here = {peer.incarnation for peer in message.peers}
                self.pairs &= here
                new = [decode for decode in sorted(here - self.pairs) if self.role == "prefill"]
                return self._without(here) + [self._pair(decode) for decode in new]
            case Reserve():
                return [self._reserve(message)]
            case Prefill():
                return [self._prefill(message)]
            case Cancel(generation=generation):
                self.log.pop(generation, None)
                self.live.pop(generation, None)
                self.closed.add(generation)
                return [GenerationReleased(generation=generation)]
            case Confirm():
                for row in message.rows:
                    self._confirm(row.generation, row.outputs)
            case Resend(generation=generation, start_index=start):
                rows = [
                    r
                    for r in self.log.get(generation, [])
                    if r.start_index + len(r.token_ids) > start
                ]
                return [Output(rows=tuple(rows))] if rows else []
            case _:
                pass
        return []

    def _pair(self, decode: str) -> WorkerToCoordinator:
        if self.refuses_pairs:
            return PairClosed(decode=decode, reason="no path between them", refused=True)
        self.pairs.add(decode)
        return PairReady(decode=decode)

    def _without(self, peers: set[str]) -> list[WorkerToCoordinator]:
        """What was on its way from, or to, somebody who is gone cannot come any more."""
        if self.dull:
            return []
        halves = [
            g
            for g, r in self.live.items()
            if r.peer not in peers and r.phase in ("receiving", "computing", "sending")
        ]
        return [m for g in halves for m in self.fail(g, "transfer_failed")]

    def _reserve(self, ask: Reserve) -> WorkerToCoordinator:
        generation = ask.generation
        if generation in self.closed:
            return Refused(generation=generation, code="closed", reason="closed")
        if generation not in self.live:
            if self.draining:
                return MustWait(generation=generation, reason="draining")
            used = sum(self.geometry.blocks(r.request.capacity_tokens) for r in self.live.values())
            need = self.geometry.blocks(ask.request.capacity_tokens)
            if need > self.num_blocks and not self.refuses_never:
                self.closed.add(generation)
                return Refused(generation=generation, code="too_long", reason="pool too small")
            if used + need > self.num_blocks:
                return MustWait(generation=generation, reason="full")
            outputs = self._replayed(ask.request)
            self.live[generation] = _Record(ask.request, ask.prefill, "receiving", outputs)
        return Reserved(
            generation=generation,
            reservation=Reservation(
                allocation=AllocationId(generation), tables=((1,),) * DEPTHS, hidden_slot=1
            ),
            stamps=(Stamp("reserved", 1.0),),
        )

    def _prefill(self, ask: Prefill) -> WorkerToCoordinator:
        if ask.generation in self.closed:
            return Refused(generation=ask.generation, code="closed", reason="closed")
        self._replayed(ask.request)
        self.live.setdefault(ask.generation, _Record(ask.request, ask.decode, "computing"))
        return PrefillAccepted(generation=ask.generation)

    def _replayed(self, request: EngineRequest) -> int:
        """How many outputs the client has already. They are as they would have come from here."""
        count, total = len(request.delivered), request.sampling.max_tokens
        tokens = self.says or expected_tokens(request.prompt, total)
        assert request.delivered == tokens[:count]
        assert request.delivered_depths == expected_depths(total)[:count]
        return count

    def _confirm(self, generation: Generation, outputs: int) -> None:
        rows = self.log.get(generation, [])
        if rows and rows[-1].finish_reason and outputs >= _stop(rows[-1]):
            del self.log[generation]

    def _release(self, generation: Generation) -> GenerationReleased:
        del self.live[generation]
        self.closed.add(generation)
        return GenerationReleased(generation=generation)

    def fail(self, generation: Generation, code: str) -> list[WorkerToCoordinator]:
        self.log.pop(generation, None)
        return [
            GenerationFailed(generation=generation, code=code, error="scripted"),
            self._release(generation),
        ]

    def compute(self, generation: Generation) -> list[WorkerToCoordinator]:
        """P has computed the prompt."""
        record = self.live[generation]
        if record.phase != "computing":
            return []
        record.phase = "sending"
        return [PrefillComplete(generation=generation, stamps=(Stamp("prefill_done", 2.0),))]

    def receive(self, generation: Generation) -> list[WorkerToCoordinator]:
        """D has everything that P sent."""
        self.live[generation].phase = "received"
        return [RequestReceived(generation=generation, stamps=(Stamp("committed", 3.0),))]

    def acked(self, generation: Generation) -> list[WorkerToCoordinator]:
        """P has heard that D has received everything."""
        return [self._release(generation)]

    def decode_step(
        self, generation: Generation, count: int | None = None
    ) -> list[WorkerToCoordinator]:
        """D activates, or produces up to `count` tokens and releases after the last."""
        count = count or self.burst
        record = self.live[generation]
        if record.phase == "received":
            record.phase = "active"
            activated = RequestActivated(
                generation=generation,
                stamps=(Stamp("activated", 4.0),),
                prefill_tokens=0,
                recurrent_loops=0,
            )
            return [activated]
        if record.phase != "active":
            return []
        start, total = record.outputs, record.request.sampling.max_tokens
        stop = min(start + count, total)
        tokens = self.says or expected_tokens(record.request.prompt, total)
        row = OutputRow(
            generation=generation,
            start_index=start,
            token_ids=tokens[start:stop],
            exit_depths=expected_depths(total)[start:stop],
            logprobs=tuple(
                TokenLogprobs(-0.5, ((token, -0.5),) * record.request.sampling.logprobs)
                for token in tokens[start:stop]
                if record.request.sampling.logprobs is not None
            ),
            finish_reason=FinishReason.LENGTH if stop == total else None,
        )
        record.outputs = stop
        self.log.setdefault(generation, []).append(row)
        messages: list[WorkerToCoordinator] = [Output(rows=(row,))]
        if stop == total:
            messages.append(self._release(generation))
        return messages


def _stop(row: OutputRow) -> int:
    return row.start_index + len(row.token_ids)


def hand_over(
    prefill: ScriptedWorker, decode: ScriptedWorker, generation: Generation
) -> tuple[list[WorkerToCoordinator], list[WorkerToCoordinator]]:
    """P's WRITEs have all arrived at D, if both still want that: what each then says."""
    source, target = prefill.live.get(generation), decode.live.get(generation)
    if source is None or target is None:
        return [], []
    if source.phase != "sending" or target.phase != "receiving":
        return [], []
    received = decode.receive(generation)
    return prefill.acked(generation), received
