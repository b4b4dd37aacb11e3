"""One attempt at one request: a generation with a leg at P and a leg at D.

Owns the phase and the facts known about both legs. The attempt outlives its request until both
workers have let go. Facts (accepted, received, released) never stand for a phase.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from ..runtime.errors import ProtocolError
from ..runtime.events import Reservation
from ..runtime.types import EngineRequest, Generation
from .request import Request

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")


class Phase(Enum):
    RESERVING = "reserving"  # Reserve is asked of D; P knows nothing
    STARTING = "starting"  # Prefill is asked of P
    RUNNING = "running"  # both legs have taken it
    FINISHED = "finished"  # the whole output is here; the legs let go by themselves
    CANCELLING = "cancelling"  # Cancel is asked of each leg that has not let go


_MOVES = {
    Phase.RESERVING: {Phase.STARTING, Phase.CANCELLING},
    Phase.STARTING: {Phase.RUNNING, Phase.FINISHED, Phase.CANCELLING},
    Phase.RUNNING: {Phase.FINISHED, Phase.CANCELLING},
    Phase.FINISHED: set[Phase](),
    Phase.CANCELLING: set[Phase](),
}


@dataclass(eq=False)
class Leg:
    """worker: incarnation. asked: it was sent something that may have left state there.
    known: it has answered that it holds the generation."""

    role: Role
    worker: str
    asked: bool = False
    known: bool = False
    released: bool = False


@dataclass(eq=False, kw_only=True)
class Attempt:
    generation: Generation
    request: Request
    engine_request: EngineRequest
    prefill: Leg
    decode: Leg
    phase: Phase = Phase.RESERVING
    reservation: Reservation | None = None  # what D promised
    must_wait: bool = False  # D said: not before something is released
    computed: bool = False  # P has computed everything
    received: bool = False  # D holds the whole prompt
    activated: bool = False
    prefill_let_go_s: float | None = None  # when P said so
    prefill_lost: str | None = None  # why P is gone, while D may still have got everything
    lost_version: int = 0  # D knows that P is gone if it has heard of these peers
    legs: tuple[Leg, Leg] = field(init=False)

    def __post_init__(self) -> None:
        self.legs = (self.prefill, self.decode)

    def move(self, to: Phase) -> None:
        if to not in _MOVES[self.phase]:
            raise ProtocolError(
                f"generation {self.generation}: {self.phase.value} -> {to.value} is not a move"
            )
        self.phase = to

    @property
    def live(self) -> bool:
        """Its request still depends on it."""
        return self.phase in (Phase.RESERVING, Phase.STARTING, Phase.RUNNING)

    @property
    def fate_unknown(self) -> bool:
        """P is gone, and D has not said yet whether it holds the whole prompt."""
        return self.live and self.prefill_lost is not None and not self.received

    @property
    def writer_never_started(self) -> bool:
        return not self.prefill.asked

    def leg_at(self, incarnation: str) -> Leg | None:
        for leg in self.legs:
            if leg.worker == incarnation:
                return leg
        return None
