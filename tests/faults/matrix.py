"""The fault matrix: which fault meets requests in which stage over which transport.

Pure description: the cells, the service that each needs, and what may come of its requests. How
they are run is in matrix_cell.py.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

Fault = Literal[
    "cancel",
    "deadline",
    "P killed",
    "D killed",
    "P stopped",
    "D stopped",
    "C killed",
    "link cut",
]
Stage = Literal["reserving", "computing", "sending", "committed", "activating", "decoding"]
FAULTS: tuple[Fault, ...] = Fault.__args__  # type: ignore[attr-defined]
STAGES: tuple[Stage, ...] = Stage.__args__  # type: ignore[attr-defined]
TRANSPORTS = {"default": None, "tcp": "tcp"}  # UCX_TLS

RIGHT = "right tokens"
ERRORS: dict[Fault, str] = {
    "cancel": "cancelled",
    "deadline": "deadline_exceeded",
    "C killed": "service_lost",
}
BEFORE_RECEIVED = ("reserving", "computing", "sending")
AFTER_RECEIVED = ("activating", "decoding")


@dataclass(frozen=True)
class Setting:
    """What one service is for: all stages of one fault over one transport."""

    fault: Fault
    transport: str

    @property
    def team(self) -> tuple[int, int]:
        """Prefill and decode workers. Over tcp another pair can take over; over the default one the
        request waits for the worker, or the link, to come back."""
        if self.transport == "default" or self.fault in ("cancel", "deadline", "C killed"):
            return 1, 1
        return (1, 2) if self.fault == "link cut" else (2, 2)

    @property
    def pairs(self) -> int:
        prefill, decode = self.team
        return prefill * decode


@dataclass(frozen=True)
class Cell:
    setting: Setting
    stage: Stage

    @property
    def fault(self) -> Fault:
        return self.setting.fault

    @property
    def end(self) -> str:
        """With what its requests end."""
        return ERRORS.get(self.fault, RIGHT)

    @property
    def victim(self) -> Literal["prefill", "decode", "coordinator"] | None:
        """The role of the process that does not survive."""
        roles = {"P": "prefill", "D": "decode", "C": "coordinator"}
        return roles.get(self.fault.partition(" ")[0])  # type: ignore[return-value]

    @property
    def untouched(self) -> bool:
        """D holds the whole prompt, and nobody needs what the fault takes away."""
        loses_p = self.victim == "prefill" or self.fault == "link cut"
        return loses_p and self.stage in AFTER_RECEIVED

    @property
    def must_retry(self) -> bool:
        """Else no request was where the fault could hurt it, and the cell shows nothing."""
        if self.victim == "decode":
            return True
        loses_p = self.victim == "prefill" or self.fault == "link cut"
        return loses_p and self.stage in BEFORE_RECEIVED

    @property
    def must_replay(self) -> bool:
        return self.victim == "decode" and self.stage == "decoding"

    def __str__(self) -> str:
        words = (self.fault, self.stage, self.setting.transport)
        return "-".join(word.replace(" ", "_") for word in words)


SETTINGS = tuple(Setting(fault, transport) for fault in FAULTS for transport in TRANSPORTS)
CELLS = tuple(Cell(setting, stage) for setting in SETTINGS for stage in STAGES)


class Result(msgspec.Struct, frozen=True):
    """What came of one cell. Seconds count from the fault."""

    fault: str
    stage: str
    transport: str
    team: str
    end: str
    retries: int  # of the request that was retried most
    replays: int  # of all requests
    ended_s: float
    released_s: float
    quarantined: int  # blocks, at most at once
