"""A decode worker's end in a process of its own: accepts one peer, tells what arrives.

One JSON line in (hello), one out (welcome), then a line per arrival. Lines in: `dump PATH` writes
the pools' bytes, anything else ends it.
"""

import select
import sys
from pathlib import Path

import msgspec
import torch

from rlt.connector.geometry import PoolDescription
from rlt.connector.nixl_transport import NixlTransport
from rlt.connector.worker_connector import WorkerConnector
from rlt.runtime.clock import SystemClock
from rlt.runtime.types import Dtype, KVGeometry


class Hello(msgspec.Struct, frozen=True):
    name: str
    metadata: bytes
    pool: PoolDescription
    blocks: int
    rows: int
    own_name: str


class Welcome(msgspec.Struct, frozen=True):
    metadata: bytes
    pool: PoolDescription


def main() -> None:
    torch.set_num_threads(1)
    hello = msgspec.json.decode(sys.stdin.buffer.raw.readline(), type=Hello)
    kv, hidden = pools(hello.pool.geometry, hello.blocks, hello.rows)
    connector = WorkerConnector(
        NixlTransport(kv, hidden, hello.pool.geometry, name=hello.own_name),
        clock=SystemClock(),
        max_inflight_bytes=1 << 20,
        transfer_timeout_s=30,
    )
    metadata = connector.accept_peer(hello.name, hello.metadata, hello.pool)
    say(Welcome(metadata, connector.pool))
    while True:
        for arrival in connector.poll().arrived:
            say(arrival)
        if select.select([sys.stdin], [], [], 0.0005)[0]:
            word, _, path = sys.stdin.buffer.raw.readline().decode().strip().partition(" ")
            if word != "dump":
                break
            halves = [half.view(torch.uint8).numpy().tobytes() for half in (kv, hidden)]
            Path(path).write_bytes(b"".join(halves))
            say(path)
    connector.remove_peer(hello.name)
    connector.close()


def pools(shape: KVGeometry, blocks: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    dtypes: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    heads = (shape.num_layers, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
    kv = torch.full((blocks * shape.block_bytes,), 0x5A, dtype=torch.uint8)
    hidden = torch.full((rows * shape.hidden_bytes,), 0x5A, dtype=torch.uint8)
    dtype = dtypes[shape.dtype]
    return kv.view(dtype).view(blocks, *heads), hidden.view(dtype).view(rows, shape.hidden_size)


def say(record: object) -> None:
    sys.stdout.write(msgspec.json.encode(record).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
