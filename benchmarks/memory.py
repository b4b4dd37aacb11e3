"""Resident memory of every process of a running service, next to its weights and KV pool.

    python -P benchmarks/memory.py [--model DIR] [--num-blocks N]

Starts 1 prefill and 1 decode worker, answers requests that fill much of the pool, then reads /proc.
"""

import argparse
import json
from pathlib import Path

from rlt.coordinator.client import Client
from rlt.launch.cli import EMBEDDED_MODEL
from rlt.launch.running import running_service
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import RequestId, SamplingParams

MIB = 1 << 20
PROMPT_TOKENS = 200
OUTPUT_TOKENS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL)
    parser.add_argument("--num-blocks", type=int, default=2048)
    options = parser.parse_args()
    arguments = ["--model", str(options.model), "--num-blocks", str(options.num_blocks)]
    with (
        running_service([*arguments, "--log-level", "warning"]) as service,
        Client(service.endpoint) as client,
    ):
        needs = plane_blocks(PROMPT_TOKENS + OUTPUT_TOKENS) * loops(options.model)
        answer_all(client, max(1, options.num_blocks // needs))
        workers = client.stats()["workers"]
        assert isinstance(workers, tuple | list)
        own = weight_bytes(options.model) + pool_bytes(options.model, options.num_blocks)
        print(f"weights and KV pool of each worker: {own / MIB:.1f} MiB")
        for name, pid in [(w["worker"], w["pid"]) for w in workers]:
            resident = resident_bytes(pid)
            over = (resident - own) / MIB
            print(f"{name:<12} resident {resident / MIB:7.1f} MiB, over that {over:7.1f} MiB")
        coordinator = resident_bytes(coordinator_pid(service.launcher.pid, workers))
        print(f"{'coordinator':<12} resident {coordinator / MIB:7.1f} MiB")
        print(f"{'launcher':<12} resident {resident_bytes(service.launcher.pid) / MIB:7.1f} MiB")


def answer_all(client: Client, count: int) -> None:
    for number in range(count):
        client.submit(
            GenerateRequest(
                request_id=RequestId(str(number)),
                prompt_token_ids=tuple((number + i) % 500 for i in range(PROMPT_TOKENS)),
                sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
            )
        )
    ended = 0
    while ended < count:
        ended += sum(delta.finish_reason is not None for delta in client.outputs())


def config(model: Path) -> dict[str, int]:
    loaded: dict[str, int] = json.loads((model / "config.json").read_text())
    return loaded


def loops(model: Path) -> int:
    return config(model)["total_ut_steps"]


def plane_blocks(positions: int, block_size: int = 16) -> int:
    return -(-positions // block_size)


def weight_bytes(model: Path) -> int:
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def pool_bytes(model: Path, num_blocks: int, block_size: int = 16) -> int:
    """float32; a block is block_size positions of one depth plane, every layer, K and V."""
    shape = config(model)
    per_position = shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * shape["head_dim"]
    return num_blocks * block_size * per_position * 4


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def coordinator_pid(
    launcher: int, workers: "list[dict[str, int]] | tuple[dict[str, int], ...]"
) -> int:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    (pid,) = {int(child) for child in children} - {worker["pid"] for worker in workers}
    return pid


if __name__ == "__main__":
    main()
