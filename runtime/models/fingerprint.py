"""A digest over a checkpoint's maths and weights, equal in every process that loads it.

Two workers may pair only if theirs are equal. Small checkpoints are hashed whole; of large ones the
header, the size and evenly spread samples, so that start-up does not read them twice.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from .config import OuroConfig

WHOLE_BYTES = 256 * 1024**2
SAMPLES = 64
SAMPLE_BYTES = 64 * 1024


def fingerprint(config: OuroConfig, files: Sequence[Path]) -> str:
    digest = hashlib.blake2b(repr(astuple(config)).encode(), digest_size=16)
    whole = sum(path.stat().st_size for path in files) <= WHOLE_BYTES
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            if whole:
                digest.update(file.read())
                continue
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header_bytes))
            for sample in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
