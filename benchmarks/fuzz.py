"""Fuzzing guided by coverage: every decoder and every state machine, with atheris.

    pip install atheris
    python -P benchmarks/fuzz.py --seconds 120                      # each target for so long
    python -P benchmarks/fuzz.py --target receiver --run FILE       # one input again

Needs the packages of rlt's tests, and atheris, which is no dependency of rlt. Prints executions and
findings of each target; the input of every finding is left in a file.
"""

import argparse
import hashlib
import importlib
import logging
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS = (
    *("decoders", "coordinator", "receiver", "sender", "client"),
    *("decode_engine", "prefill_engine"),
)
MAX_BYTES = 1200


def main() -> int:
    options = _options()
    sys.path.append(str(ROOT))  # behind all packages: the folder kernels/ stands there too
    if options.run is not None:
        _target(options.target)(options.run.read_bytes())
        return 0
    if options.target is not None:
        return _fuzz(options)
    codes = [subprocess.run(_alone(name, options)).returncode for name in TARGETS]
    return max(codes)


def _alone(name: str, options: argparse.Namespace) -> list[str]:
    """The command for one target: libFuzzer takes a process of its own."""
    given = {"--target": name, "--seconds": options.seconds, "--seed": options.seed}
    more = ["--corpus", str(options.corpus)] if options.corpus else []
    flags = [str(word) for pair in given.items() for word in pair]
    return [sys.executable, "-P", __file__, *flags, *more, "--findings", str(options.findings)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=TARGETS, help="one target; all of them otherwise")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="folder that keeps what reached new code")
    parser.add_argument("--findings", type=Path, default=Path("."), help="folder for their inputs")
    parser.add_argument("--run", type=Path, metavar="FILE", help="run one input again")
    options = parser.parse_args()
    if options.run is not None and options.target is None:
        parser.error("--run needs --target")
    return options


def _target(name: str) -> Callable[[bytes], None]:
    logging.disable(logging.CRITICAL)
    target: Callable[[bytes], None] = importlib.import_module("tests.faults.targets").TARGETS[name]
    return target


class Findings:
    """Faults by where they were raised; the first input of each is kept."""

    def __init__(self, target: str, folder: Path) -> None:
        self._target = target
        self._folder = folder
        self.runs = 0
        self.found: dict[str, Path] = {}

    def run(self, target: Callable[[bytes], None], data: bytes) -> None:
        self.runs += 1
        try:
            target(data)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} at {last.filename}:{last.lineno}"
            if where not in self.found:
                name = f"{self._target}-{hashlib.sha256(data).hexdigest()[:12]}"
                self.found[where] = self._folder / name
                self.found[where].write_bytes(data)
                traceback.print_exc()

    def report(self, seconds: float) -> None:
        rate = self.runs / seconds
        print(
            f"{self._target:16} {self.runs:9} executions in {seconds:.0f} s ({rate:.0f}/s), ",
            end="",
        )
        print(f"{len(self.found)} findings", flush=True)
        for where, path in self.found.items():
            print(f"  {where}: {path}", flush=True)


def _fuzz(options: argparse.Namespace) -> int:
    import atheris

    with atheris.instrument_imports(include=["rlt", "tests"]):
        target = _target(options.target)
    options.findings.mkdir(parents=True, exist_ok=True)
    findings = Findings(options.target, options.findings)
    began_s = time.monotonic()

    def once(data: bytes) -> None:
        findings.run(target, data)
        if time.monotonic() - began_s > options.seconds:
            findings.report(time.monotonic() - began_s)
            os._exit(bool(findings.found))

    arguments = [sys.argv[0], f"-seed={options.seed}", f"-max_len={MAX_BYTES}", "-verbosity=0"]
    arguments += [f"-artifact_prefix={options.findings}/", "-report_slow_units=600"]
    if options.corpus is not None:
        folder = options.corpus / options.target
        folder.mkdir(parents=True, exist_ok=True)
        arguments.append(str(folder))
    atheris.Setup(arguments, once)
    atheris.Fuzz()
    return 1


if __name__ == "__main__":
    sys.exit(main())
