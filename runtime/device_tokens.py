"""The last sampled token of each slot, on the device, for a PRELUDE submitted before it was read.

Owns the token tensor and who kept which. A slot's token is read by the request that kept it alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.backend import REFERENCE, Kernels
from .batch import integers
from .errors import InvariantBroken
from .plans import CodaRow, PreludeRow
from .types import Generation


class DeviceTokens:
    def __init__(self, num_slots: int, device: torch.device, kernels: Kernels = REFERENCE) -> None:
        self._kernels = kernels
        self._tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._owner: dict[int, Generation] = {}

    @property
    def num_bytes(self) -> int:
        return self._tokens.nbytes

    def keep(self, rows: Sequence[CodaRow], sampled: Tensor) -> None:
        """sampled: [rows] int64, on the device."""
        kept = [(index, row.keep_slot) for index, row in enumerate(rows)]
        chosen = [(index, slot) for index, slot in kept if slot is not None]
        if not chosen:
            return
        slots = integers([slot for _, slot in chosen], self._tokens)
        if len(chosen) < len(rows):
            chosen_rows = integers([index for index, _ in chosen], sampled)
            sampled = self._kernels.gather_rows(sampled, chosen_rows)
        self._kernels.scatter_rows(self._tokens, slots, sampled)
        for index, slot in chosen:
            self._owner[slot] = rows[index].generation

    def inputs(self, rows: Sequence[PreludeRow]) -> Tensor:
        """[rows] int64: the token each row names, or the one that its slot kept."""
        given = integers([row.token or 0 for row in rows], self._tokens)
        on_device = [index for index, row in enumerate(rows) if row.token is None]
        if not on_device:
            return given
        for index in on_device:
            self._check(rows[index])
        slots = integers([rows[index].slot for index in on_device], self._tokens)
        kept = self._kernels.gather_rows(self._tokens, slots)
        self._kernels.scatter_rows(given, integers(on_device, given), kept)
        return given

    def take(self, generation: Generation, slot: int) -> Tensor | None:
        """A host copy of what `generation` kept there, or None; it is no longer kept."""
        if self._owner.get(slot) != generation:
            return None
        del self._owner[slot]
        return self._tokens[slot].clone().cpu()

    def put(self, generation: Generation, slot: int, token: Tensor | None) -> None:
        if token is not None:
            self._tokens[slot] = token
            self._owner[slot] = generation

    def _check(self, row: PreludeRow) -> None:
        if self._owner.get(row.slot) != row.generation:
            raise InvariantBroken(
                f"generation {row.generation}: no token is kept on the device for slot {row.slot}; "
                "its CODA row must name it as keep_slot"
            )
