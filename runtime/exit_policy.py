"""When a token has looped enough: one policy object per request, fed one gate score per loop.

Owns the cumulative exit state of the token that is looping; it restarts with every token. Never
sees a tensor, a queue or another request.
A score is asked for only where it can change the answer: a fixed depth costs no gate.
"""

from typing import Protocol

from .types import ExitSettings


class ExitPolicy(Protocol):
    """Loops are counted from 1: loop r writes depth r - 1."""

    def start_token(self, output_index: int) -> None:
        """The loops to come produce output `output_index`."""
        ...

    def wants_score(self, loop: int) -> bool: ...
    def exits_after(self, loop: int, score: float | None) -> bool:
        """Feed the score of `loop` (None where none was wanted) and decide."""
        ...


class OuroExit:
    """Exit after loop r >= min_loops once 1 - prod(1 - hazard_i, i <= r) reaches the threshold.

    Loops before min_loops count in the product. Threshold 1 never exits early, even where a
    float32 sigmoid rounds to 1; threshold 0 exits at min_loops.
    """

    def __init__(self, settings: ExitSettings) -> None:
        self._settings = settings
        self._survival = 1.0  # prod(1 - hazard), in double
        self._reads_gate = 0.0 < settings.threshold < 1.0 and (
            settings.min_loops < settings.max_loops
        )

    def start_token(self, output_index: int) -> None:
        self._survival = 1.0

    def wants_score(self, loop: int) -> bool:
        return self._reads_gate and loop < self._settings.max_loops

    def exits_after(self, loop: int, score: float | None) -> bool:
        settings = self._settings
        if score is not None:
            self._survival *= 1.0 - score
        if loop >= settings.max_loops:
            return True
        if loop < settings.min_loops or settings.threshold >= 1.0:
            return False
        return 1.0 - self._survival >= settings.threshold


def exit_policy_for(settings: ExitSettings) -> ExitPolicy:
    return OuroExit(settings)
