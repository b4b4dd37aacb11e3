"""Host copies of what suspended requests held on the device: KV blocks, hidden row, token, chunk.

Owns these bytes and their bound. A snapshot is opened by the caller, filled and read back by the
compute thread; its memory is taken when it is opened, so that filling it cannot run out.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import CapacityError, ProtocolError
from .kv_storage import KVStorage
from .types import BlockTables, Generation

TOKEN_BYTES = 8
COPY_BYTES = 64 * 1024**2  # of one copy between device and host


@dataclass
class Snapshot:
    """blocks: each block once, in table order. places: for every table entry, its block's index."""

    blocks: tuple[int, ...]
    places: tuple[int, ...]
    columns: tuple[int, ...]  # blocks per plane
    num_bytes: int
    kv: Tensor
    hidden: Tensor
    token: Tensor | None = None
    chunk: Tensor | None = None
    error: str | None = field(default=None)  # why it could not be filled


class Snapshots:
    def __init__(self, storage: KVStorage, bound_bytes: int) -> None:
        self._storage = storage
        self.bound_bytes = bound_bytes
        self._held: dict[Generation, Snapshot] = {}

    @property
    def num_bytes(self) -> int:
        return sum(snapshot.num_bytes for snapshot in list(self._held.values()))

    def open(self, generation: Generation, tables: BlockTables, chunk_bytes: int) -> Snapshot:
        if generation in self._held:
            raise ProtocolError(f"generation {generation} is suspended already; restore it first")
        entries = [block for plane in tables for block in plane]
        index = {block: place for place, block in enumerate(dict.fromkeys(entries))}
        geometry = self._storage.geometry
        size = len(index) * geometry.block_bytes + geometry.hidden_bytes + TOKEN_BYTES + chunk_bytes
        if self.num_bytes + size > self.bound_bytes:
            raise CapacityError(
                f"generation {generation}: a snapshot of {size} bytes beside {self.num_bytes} held "
                f"ones exceeds the bound of {self.bound_bytes}; raise --snapshot-bytes"
            )
        kv, hidden = self._storage.kv, self._storage.hidden
        snapshot = Snapshot(
            blocks=tuple(index),
            places=tuple(index[block] for block in entries),
            columns=tuple(len(plane) for plane in tables),
            num_bytes=size,
            kv=torch.empty(len(index), *kv.shape[1:], dtype=kv.dtype),
            hidden=torch.empty(hidden.shape[1], dtype=hidden.dtype),
        )
        self._held[generation] = snapshot
        return snapshot

    def fitting(self, generation: Generation, tables: BlockTables) -> Snapshot:
        """The snapshot, after checking that these tables have room for it."""
        snapshot = self._held.get(generation)
        if snapshot is None:
            raise ProtocolError(f"generation {generation} is not suspended; nothing to restore")
        if len(tables) != len(snapshot.columns) or any(
            len(plane) < columns for plane, columns in zip(tables, snapshot.columns, strict=True)
        ):
            raise ProtocolError(
                f"generation {generation}: {[len(plane) for plane in tables]} blocks per plane "
                f"have no room for a snapshot of {list(snapshot.columns)}"
            )
        return snapshot

    def drop(self, generation: Generation) -> bool:
        """Whether there was one."""
        return self._held.pop(generation, None) is not None


def save_blocks(kv: Tensor, snapshot: Snapshot) -> None:
    for part in _parts(len(snapshot.blocks), snapshot.kv):
        chosen = torch.tensor(snapshot.blocks[part], dtype=torch.int64, device=kv.device)
        snapshot.kv[part] = kv.index_select(0, chosen).to(snapshot.kv.device)


def load_blocks(kv: Tensor, snapshot: Snapshot, tables: BlockTables) -> None:
    """Into the first blocks of each plane's row; further ones stay as they are."""
    targets = [
        block
        for plane, columns in zip(tables, snapshot.columns, strict=True)
        for block in plane[:columns]
    ]
    for part in _parts(len(targets), snapshot.kv):
        chosen = torch.tensor(targets[part], dtype=torch.int64, device=kv.device)
        places = torch.tensor(snapshot.places[part], dtype=torch.int64)
        kv.index_copy_(0, chosen, snapshot.kv.index_select(0, places).to(kv.device))


def poison(kv: Tensor, tokens: int, block_size: int, tables: BlockTables) -> None:
    """NaN over positions >= tokens of these tables: whoever reads one gets no number."""
    column, offset = divmod(tokens, block_size)
    whole = column + (offset > 0)
    cut = [plane[column] for plane in tables if offset and column < len(plane)]
    dropped = [block for plane in tables for block in plane[whole:]]
    if cut:
        kv[torch.tensor(cut, device=kv.device), :, :, offset:] = float("nan")
    if dropped:
        kv.index_fill_(0, torch.tensor(dropped, device=kv.device), float("nan"))


def _parts(count: int, blocks: Tensor) -> list[slice]:
    step = max(1, COPY_BYTES // max(1, blocks[:1].nbytes))
    return [slice(start, start + step) for start in range(0, count, step)]
