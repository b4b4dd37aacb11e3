"""Many open HTTP streams on one coordinator whose workers are scripted: they compute nothing.

The coordinator runs in this process, the workers and the callers in one process each. Every token
of every stream is compared with what the scripted workers must give. Printed: tokens wrong (lost,
doubled or out of order), the event loop's lag, and memory after each block of requests.

    python -P benchmarks/http_streams.py --streams 500 --requests 10000
"""

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from rlt.connector.channel import DealerChannel
from rlt.connector.messages import CoordinatorToWorker, Output, Shutdown, WorkerToCoordinator
from rlt.coordinator.config import CoordinatorConfig
from rlt.coordinator.http.serving import http_front
from rlt.coordinator.service import CoordinatorService

SCRIPT = Path(__file__).parent.parent / "tests" / "coordinator" / "workers.py"
LAG_STEP_S = 0.005
BEAT_S = 0.5


def scripted() -> Any:
    spec = importlib.util.spec_from_file_location("scripted_workers", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=500, help="open at the same time")
    parser.add_argument("--requests", type=int, default=10_000, help="all together")
    parser.add_argument("--tokens", type=int, default=40, help="of each request")
    parser.add_argument("--step-s", type=float, default=0.1, help="between a worker's outputs")
    options = parser.parse_args()
    print(json.dumps(uvloop.run(measure(options)), indent=2))


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    with tempfile.TemporaryDirectory(prefix="rlt-h") as folder:
        config = CoordinatorConfig(
            runtime_dir=folder, expected_prefill=1, expected_decode=2, http="127.0.0.1:0"
        )
        service = CoordinatorService(config, Path(folder), None)
        service.bind()
        async with http_front(service, config, None):
            serving = asyncio.create_task(service.run())
            workers = spawn.Process(
                target=run_workers, args=(service.worker_endpoint, options.step_s), daemon=True
            )
            workers.start()
            while not (Path(folder) / "service.json").exists():
                await asyncio.sleep(0.05)
            callers = spawn.Process(
                target=run_callers, args=(service.http_address, options, there), daemon=True
            )
            callers.start()
            watch = Watch()
            found = await watch.until(here)
            service.stop()
            await serving
        service.close()
        callers.join()
        workers.join(10.0)
        workers.kill()
    return {"configuration": vars(options), **found, **watch.report()}


class Watch:
    """The loop's lag all the time, and this process's memory whenever the callers say so."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._memory: list[float] = []

    async def until(self, callers: Connection) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        loop.add_reader(callers.fileno(), arrived.set)
        sampler = asyncio.create_task(self._sample())
        try:
            while True:
                await arrived.wait()
                arrived.clear()
                while callers.poll():
                    told = callers.recv()
                    if told is not None:
                        return dict(told)
                    self._memory.append(resident_mb())
        finally:
            loop.remove_reader(callers.fileno())
            sampler.cancel()

    async def _sample(self) -> None:
        while True:
            start_s = time.perf_counter()
            await asyncio.sleep(LAG_STEP_S)
            self._lags.append(time.perf_counter() - start_s - LAG_STEP_S)

    def report(self) -> dict[str, Any]:
        lags = sorted(self._lags)
        return {
            "lag_p50_ms": round(1000 * lags[len(lags) // 2], 2),
            "lag_p99_ms": round(1000 * lags[len(lags) * 99 // 100], 2),
            "lag_max_ms": round(1000 * lags[-1], 2),
            "memory_mb": self._memory,
        }


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * 4096 / 1e6, 1)


# The workers' process


def run_workers(endpoint: str, step_s: float) -> None:
    uvloop.run(work(endpoint, step_s))


async def work(endpoint: str, step_s: float) -> None:
    members = [Member(name, role, endpoint) for name, role in ROLES]
    prefill, *decodes = members
    last_beat_s = 0.0
    while not any(member.stopped for member in members):
        await asyncio.sleep(step_s)
        if time.monotonic() - last_beat_s > BEAT_S:
            last_beat_s = time.monotonic()
            for member in members:
                member.send([member.worker.heartbeat()])
        prefill.prefill_step(decodes)
        for decode in decodes:
            decode.decode_step()
    for member in members:
        member.channel.close()


ROLES = (("p0", "prefill"), ("d0", "decode"), ("d1", "decode"))


class Member:
    """One scripted worker; like a real one it sends one frame of output per step."""

    def __init__(self, name: str, role: str, endpoint: str) -> None:
        self._script = scripted()
        self.worker = self._script.ScriptedWorker(
            name, role, num_blocks=1 << 20, num_slots=4096, num_receive_slots=4096
        )
        self.stopped = False
        self.channel: DealerChannel[CoordinatorToWorker, WorkerToCoordinator] = DealerChannel(
            CoordinatorToWorker, self._hear, identity=self.worker.incarnation.encode()
        )
        self.channel.connect(endpoint)
        self.channel.send(self.worker.register())

    def _hear(self, message: CoordinatorToWorker) -> None:
        self.stopped = self.stopped or isinstance(message, Shutdown)
        self.send(self.worker.handle(message))
        self.worker.heard.clear()

    def send(self, messages: list[WorkerToCoordinator]) -> None:
        for message in messages:
            self.channel.send(message)

    def prefill_step(self, decodes: list["Member"]) -> None:
        targets = {decode.worker.incarnation: decode for decode in decodes}
        for generation, record in list(self.worker.live.items()):
            self.send(self.worker.compute(generation))
            target = targets[record.peer]
            released, received = self._script.hand_over(self.worker, target.worker, generation)
            self.send(released)
            target.send(received)

    def decode_step(self) -> None:
        rows: list[Any] = []
        others: list[WorkerToCoordinator] = []
        for generation in list(self.worker.live):
            for message in self.worker.decode_step(generation):
                if isinstance(message, Output):
                    rows += message.rows
                else:
                    others.append(message)
        if rows:
            self.send([Output(rows=tuple(rows))])
        self.send(others)


# The callers' process


def run_callers(address: str, options: argparse.Namespace, pipe: Connection) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    pipe.send(uvloop.run(call_all(address, options, pipe)))


async def call_all(address: str, options: argparse.Namespace, pipe: Connection) -> dict[str, Any]:
    numbers = iter(range(options.requests))
    expected_tokens = scripted().expected_tokens
    found = {"requests": 0, "wrong": 0, "tokens": 0, "seconds": 0.0}
    host, _, port = address.removeprefix("http://").rpartition(":")

    async def caller() -> None:
        for number in numbers:
            prompt = (number % 100, number // 100)
            tokens = await stream(host, int(port), prompt, options.tokens)
            found["requests"] += 1
            found["tokens"] += len(tokens)
            found["wrong"] += tokens != expected_tokens(prompt, options.tokens)
            if found["requests"] % max(1, options.requests // 10) == 0:
                pipe.send(None)

    start_s = time.monotonic()
    await asyncio.gather(*(caller() for _ in range(options.streams)))
    found["seconds"] = round(time.monotonic() - start_s, 1)
    return found


async def stream(host: str, port: int, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The tokens of one streamed completion; one connection each."""
    body = json.dumps(
        {"prompt": prompt, "max_tokens": count, "stream": True, "return_token_ids": True}
    )
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body.encode())
    )
    tokens: list[int] = []
    done = False
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            tokens += json.loads(line[6:])["choices"][0]["token_ids"]
        done = done or line.startswith(b"data: [DONE]")
    writer.close()
    return tuple(tokens) if done else ()


if __name__ == "__main__":
    main()
