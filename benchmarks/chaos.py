"""A service under load whose workers are killed, stopped or restarted all the time.

    python -P benchmarks/chaos.py kill --minutes 10 --every 20 --control
    python -P benchmarks/chaos.py churn --count 1000
    python -P benchmarks/chaos.py rolling

kill: 2P2D under a steady load, SIGKILL (or SIGSTOP) of a random worker every so often; the
supervisor starts it again. With --control a second, idle service stands beside it, and every
--segment minutes the kills change from one service to the other, so that the loaded one is seen
beside the same restarts when they are its own and when they are not. churn: cancels, deadlines and
kills over a pool of 1.2 times the need. rolling: rlt-ctl restart --all under load. Every answer is
compared with an undisturbed run's. Exit code 1 if anything was lost, wrong, repeated or is still
held at the end.
"""

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).parent))  # python -P leaves it out
sys.path.append(str(Path(__file__).parents[1]))

from chaos_load import Judge, Load, Record, catalogue, codes, percentile, tokens_within

from rlt.coordinator.client import AsyncClient
from tests.system.service import GOLDEN, Service, running

WINDOW_S = 10.0  # after each kill, in which the untouched pairs are looked at
SAMPLE_S = 2.0


@dataclass
class Outcome:
    """windows: (begin, end, worker) after each kill. memory: per process, its RSS over time."""

    records: list[Record] = field(default_factory=list)
    windows: list[tuple[float, float, str]] = field(default_factory=list)
    control: list[tuple[float, float, str]] = field(default_factory=list)  # of the idle service
    memory: dict[str, list[int]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    workers: dict[str, dict[str, Any]] = field(default_factory=dict)
    still_held: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    stop_s: float | None = None  # None: it did not stop in time


class Chaos:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.items = catalogue(options.seed, 40, options.max_tokens)

    async def run(self) -> tuple[Outcome, Judge]:
        options = self.options
        with ExitStack() as stack:
            services = [stack.enter_context(self._service()) for _ in range(1 + options.control)]
            async with AsyncClient(services[0].address, timeout_s=30.0) as client:
                load = Load(client, self.items, options.seed)
                judge = Judge(await load.all_once(), GOLDEN)
                outcome = Outcome()
                began_s = time.monotonic()
                sampling = asyncio.ensure_future(self._sample(services[0], outcome))
                await self._disturb(services, load, outcome)
                outcome.seconds = time.monotonic() - began_s
                outcome.records = load.records
                outcome.still_held = await self._rest(services[0])
                sampling.cancel()
                statistics: Any = await client.stats()
                outcome.workers = {w["worker"]: w for w in statistics.pop("workers")}
                outcome.values = statistics
            outcome.stop_s = await asyncio.to_thread(_stopped, services[0])
        return outcome, judge

    def _service(self) -> Any:
        options = self.options
        arguments = ["--threads", "1", "--chunk-tokens", "64", "--canary", "on", "--no-http"]
        arguments += ["--num-blocks", str(options.num_blocks)]
        arguments += ["--heartbeat-timeout-s", str(options.heartbeat_timeout)]
        return running(options.prefill, options.decode, *arguments, transport=options.transport)

    async def _disturb(self, services: list[Service], load: Load, outcome: Outcome) -> None:
        options = self.options
        end_s = time.monotonic() + 60.0 * options.minutes * len(services)
        match options.mode:
            case "kill":
                killing = asyncio.ensure_future(
                    self._kill(services, outcome, lambda: time.monotonic() > end_s)
                )
                await load.steady(options.rate, killing.done)
                await killing
            case "churn":
                over = lambda: len(load.records) >= options.count  # noqa: E731
                killing = asyncio.ensure_future(self._kill(services, outcome, over))
                await load.disturbed(options.at_once, over)
                await killing
            case "rolling":
                await self._roll(services[0], load)

    async def _kill(self, services: list[Service], outcome: Outcome, over: Any) -> None:
        every_s, began_s = self.options.every, time.monotonic()
        draw = random.Random(self.options.seed)
        names = [f"prefill-{n}" for n in range(self.options.prefill)]
        names += [f"decode-{n}" for n in range(self.options.decode)]
        number = signal.SIGSTOP if self.options.signal == "stop" else signal.SIGKILL
        next_s = time.monotonic() + every_s / 2
        while not over():
            await asyncio.sleep(min(0.2, max(0.0, next_s - time.monotonic())))
            if time.monotonic() < next_s:
                continue
            segment = int((next_s - began_s) / (60.0 * self.options.segment))
            next_s += every_s
            name, service = draw.choice(names), services[segment % len(services)]
            try:
                await asyncio.to_thread(_signal, service, name, number)
            except (ValueError, psutil.NoSuchProcess):
                continue  # it is being started again just now
            now_s = time.monotonic()
            windows = outcome.windows if service is services[0] else outcome.control
            windows.append((now_s, now_s + min(WINDOW_S, every_s), name))
        await asyncio.sleep(min(WINDOW_S, every_s))

    async def _roll(self, service: Service, load: Load) -> None:
        command = [sys.executable, "-P", "-m", "rlt.launch.ctl"]
        command += ["restart", "--all", "--connect", service.address]
        loading = asyncio.Event()
        steady = asyncio.ensure_future(load.steady(self.options.rate, loading.is_set))
        await asyncio.sleep(3.0)
        for _ in range(self.options.rounds):
            ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
            print(ended.stdout[-2000:], ended.stderr[-2000:])
            if ended.returncode:
                raise SystemExit(f"rlt-ctl restart --all ended with {ended.returncode}")
        loading.set()
        await steady

    async def _sample(self, service: Service, outcome: Outcome) -> None:
        while True:
            for child in await asyncio.to_thread(service.children):
                try:
                    name = f"{_name(child)} {child.pid}"
                    outcome.memory.setdefault(name, []).append(child.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue
            await asyncio.sleep(SAMPLE_S)

    async def _rest(self, service: Service) -> dict[str, float]:
        def wait() -> dict[str, float]:
            with service.client() as client:
                end_s = time.monotonic() + 60.0
                while time.monotonic() < end_s:
                    heard = [w for w in service.workers(client).values() if "blocks_total" in w]
                    whole = len(heard) == self.options.prefill + self.options.decode
                    if whole and service.at_rest(client):
                        return {}
                    time.sleep(0.2)
                return service.held or {"workers missing": 1.0}

        return await asyncio.to_thread(wait)


def _signal(service: Service, name: str, number: int) -> None:
    service.child(name).send_signal(number)


def _stopped(service: Service) -> float | None:
    """How long it took; the log is shown, and the service killed, if that is too long."""
    began_s = time.monotonic()
    try:
        service.stop()
    except subprocess.TimeoutExpired:
        print("it does not stop:", *service.log[-100:], sep="\n", file=sys.stderr)
        service.process.kill()
        service.process.wait()
        return None
    return round(time.monotonic() - began_s, 1)


def _name(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    found = words.partition('"worker":"')[2].partition('"')[0]
    return found or ("coordinator" if "rlt.coordinator" in words else "other")


def report(outcome: Outcome, judge: Judge) -> tuple[dict[str, Any], bool]:
    """The figures, and whether all is well."""
    verdicts = [judge.judge(record) for record in outcome.records]
    counted = {name: verdicts.count(name) for name in ("right", "part", "tie", "wrong")}
    whole = [record for record in outcome.records if record.whole]
    first = [r.arrived[0][0] - r.began_s for r in whole if r.arrived]
    tokens = sum(len(record.tokens) for record in whole)
    lost = codes([record for record in outcome.records if not record.limited])
    windows = {"after own kills": outcome.windows, "after the others'": outcome.control}
    hits = sum(w["values"].get("canary_hits", 0) for w in outcome.workers.values())
    figures = {
        "requests": len(outcome.records),
        **counted,
        "cancelled": sum(r.finish == "cancelled" for r in outcome.records),
        "codes": dict(codes(outcome.records)),
        "lost": sum(lost.values()),
        "tokens repeated or out of order": sum(r.broken for r in outcome.records),
        "kills": len(outcome.windows),
        "retries": outcome.values.get("retries", 0),
        "replays": outcome.values.get("replays", 0),
        "expelled": outcome.values.get("expelled", 0),
        "seconds": round(outcome.seconds, 1),
        "goodput tokens/s": round(tokens / outcome.seconds, 1),
        **{f"tokens/s {name}": tokens_within(whole, found) for name, found in windows.items()},
        "first token p50/p99 s": [round(percentile(first, share), 3) for share in (0.5, 0.99)],
        "canary hits": hits,
        "stopped within s": outcome.stop_s,
        "still held": outcome.still_held,
        "memory MB, early and last": _memory(outcome),
    }
    faults = figures["lost"], counted["wrong"], figures["tokens repeated or out of order"], hits
    for record, verdict in zip(outcome.records, verdicts, strict=True):
        if verdict == "wrong" or (record.code and not record.limited):
            print(f"{verdict}: {record.code} {record.error} {record}"[:1500], file=sys.stderr)
    fine = not any(faults) and not outcome.still_held and outcome.stop_s is not None
    return figures, fine


def _memory(outcome: Outcome) -> dict[str, list[float]]:
    """Of the processes that lived long enough to tell."""
    most = max(map(len, outcome.memory.values()), default=0)
    told = {}
    for name, sizes in outcome.memory.items():
        if len(sizes) >= max(4, most // 4) and not name.startswith("other"):
            told[name] = [round(sizes[len(sizes) // 4] / 1e6, 1), round(sizes[-1] / 1e6, 1)]
    return told


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("mode", choices=("kill", "churn", "rolling"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--minutes", type=float, default=10.0, help="of kill")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--signal", choices=("kill", "stop"), default="kill")
    parser.add_argument("--control", action="store_true", help="kill: beside an idle service")
    parser.add_argument("--segment", type=float, default=2.0, help="minutes of kills in a row")
    parser.add_argument("--count", type=int, default=1000, help="churn: requests")
    parser.add_argument("--at-once", type=int, default=8, help="churn: requests at any time")
    parser.add_argument(
        "--rounds", type=int, default=1, help="rolling: how often each is restarted"
    )
    parser.add_argument("--num-blocks", type=int, help="of each worker; churn: 1.2 times the need")
    parser.add_argument("--heartbeat-timeout", type=float, default=5.0)
    parser.add_argument("--transport", help="UCX_TLS; UCX's own choice otherwise")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(arguments)
    if options.num_blocks is None:
        largest = -(-(100 + options.max_tokens) // 16) * 4
        need = options.at_once * largest
        options.num_blocks = int(1.2 * need) if options.mode == "churn" else 2048
    return options


def main() -> int:
    options = parse()
    again = " ".join([*sys.argv[1:], *([] if "--seed" in sys.argv else ["--seed", "1"])])
    print(f"to run it again: python -P benchmarks/chaos.py {again}", flush=True)
    chaos = Chaos(options)
    outcome, judge = asyncio.run(chaos.run())
    figures, well = report(outcome, judge)
    told = {"options": {k: str(v) for k, v in vars(options).items()}, "figures": figures}
    text = json.dumps(told, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
