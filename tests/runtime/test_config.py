"""Engine options: what is refused, by the option's name, and what the scheduler is made of."""

from typing import Any

import pytest

from rlt.runtime.config import EngineConfig, SchedulerConfig
from rlt.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"watermark": 1.0}, "--watermark must be at least 0 and below 1, got 1.0"),
        ({"watermark": -0.1}, "--watermark must be"),
        ({"watermark": float("nan")}, "--watermark must be"),
        ({"snapshot_bytes": -1}, "--snapshot-bytes must not be negative, got -1"),
        ({"random_head_seed": -1}, "--random-head-seed must not be negative"),
        ({"layout": "both"}, "--layout must be one of last_exited, shared, got 'both'"),
        ({"admission": "some"}, "--admission must be one of full, incremental, got 'some'"),
        ({"prefill_passes": 0}, "--prefill-passes must be at least 1, got 0"),
        (
            {"chunk_tokens": 64, "token_budget": 63},
            r"--token-budget must be at least --chunk-tokens \(64\), got 63",
        ),
    ],
)
def test_a_bad_option_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(model="m", **fields)


def test_the_scheduler_is_configured_from_the_engine() -> None:
    engine = EngineConfig(
        model="m",
        chunk_tokens=7,
        token_budget=9,
        prefill_passes=3,
        async_scheduling=True,
        refill=False,
        mixed_batches=False,
        prefix_cache=True,
        admission="incremental",
        watermark=0.2,
    )
    assert SchedulerConfig.from_engine(engine, max_waiting=5) == SchedulerConfig(
        chunk_tokens=7,
        token_budget=9,
        prefill_passes=3,
        max_in_flight=2,
        refill=False,
        mixed_batches=False,
        prefix_cache=True,
        admission="incremental",
        watermark=0.2,
        max_waiting=5,
    )
    assert SchedulerConfig.from_engine(EngineConfig(model="m")).max_in_flight == 1
