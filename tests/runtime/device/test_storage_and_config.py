"""Pools: shape, alignment and size. Options: a bad value is named as the command line spells it."""

from typing import Any

import msgspec
import pytest
import torch

from rlt.runtime.clock import SystemClock
from rlt.runtime.config import EngineConfig
from rlt.runtime.errors import ConfigError
from rlt.runtime.kv_storage import CPU_BYTES, KVStorage, plan_storage
from rlt.runtime.slots import SlotPool
from rlt.runtime.types import Generation, KVGeometry

from .checkpoints import CKPT, golden_worker


def geometry(**changes: Any) -> KVGeometry:
    base: dict[str, Any] = {
        "num_layers": 3,
        "num_depths": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "hidden_size": 24,
        "block_size": 16,
        "dtype": "float32",
    }
    return KVGeometry(**(base | changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_pools_are_contiguous_page_aligned_and_as_the_geometry_says(dtype: str) -> None:
    shape = geometry(dtype=dtype)
    config = EngineConfig(model="m", num_blocks=7, num_slots=3, num_receive_slots=2)
    storage = KVStorage(plan_storage(config, shape, "cpu"), shape, "cpu")
    assert storage.kv.shape == (7, 3, 2, 16, 2, 8)
    assert storage.hidden.shape == (5, 24)
    for pool in (storage.kv, storage.hidden):
        assert pool.is_contiguous()
        assert pool.data_ptr() % 4096 == 0
    assert storage.kv.stride(0) * storage.kv.itemsize == shape.block_bytes
    assert storage.hidden.stride(0) * storage.hidden.itemsize == shape.hidden_bytes


def test_the_default_cpu_pool_is_small_and_fixed() -> None:
    config = EngineConfig(model="m")
    assert plan_storage(config, geometry(), "cpu").num_blocks == 8192 // 16 * 4
    large = geometry(num_layers=24, num_kv_heads=16, head_dim=128, hidden_size=2048)
    planned = plan_storage(config, large, "cpu").num_blocks
    assert CPU_BYTES * 0.9 < planned * large.block_bytes <= CPU_BYTES


def test_a_cuda_pool_is_planned_from_measured_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = geometry()
    free_bytes = 1000 * shape.block_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_bytes, 10 * free_bytes))
    config = EngineConfig(model="m", memory_fraction=0.5)
    assert plan_storage(config, shape, "cuda").num_blocks == 500


def test_layout_shared_needs_one_plane_alone() -> None:
    shared = geometry(layout="shared")
    assert plan_storage(EngineConfig(model="m", num_blocks=1), shared, "cpu").num_blocks == 1
    assert plan_storage(EngineConfig(model="m"), shared, "cpu").num_blocks == 8192 // 16


def test_a_pool_too_small_for_one_position_names_its_option() -> None:
    with pytest.raises(ConfigError, match="--num-blocks: 3 blocks"):
        plan_storage(EngineConfig(model="m", num_blocks=3), geometry(), "cpu")


@pytest.mark.parametrize(
    "option, value",
    [
        ("model", ""),
        ("block_size", 0),
        ("num_blocks", 0),
        ("num_slots", 0),
        ("num_receive_slots", -1),
        ("chunk_tokens", 0),
        ("threads", 0),
        ("max_positions", 0),
        ("memory_fraction", 0.0),
        ("memory_fraction", 1.5),
        ("dtype", "float16"),
        ("device", "tpu"),
    ],
)
def test_a_bad_value_is_named_as_the_command_line_spells_it(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="--" + option.replace("_", "-")):
        EngineConfig(**({"model": "m"} | {option: value}))


def test_config_survives_a_process_boundary_and_refuses_unknown_keys() -> None:
    config = EngineConfig(model="m", block_size=8)
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
    with pytest.raises(msgspec.ValidationError, match="blocksize"):
        msgspec.convert({"model": "m", "blocksize": 8}, EngineConfig)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_asking_for_cuda_where_there_is_none_says_so() -> None:
    with pytest.raises(ConfigError, match="--device cuda"):
        golden_worker(device="cuda")


def test_max_positions_can_be_lowered() -> None:
    worker = golden_worker(max_positions=33, num_blocks=8)
    assert worker.parts.description.max_positions == 33
    assert worker.parts.description.name == CKPT.name


def test_the_lowest_free_slot_is_given_next() -> None:
    slots = SlotPool(5, 3)
    assert [slots.take(Generation(n)) for n in range(4)] == [5, 6, 7, None]
    assert slots.give_back(Generation(1))
    assert slots.give_back(Generation(0))
    assert not slots.give_back(Generation(0))
    assert slots.take(Generation(9)) == 5
    assert slots.find(Generation(2)) == 7
    assert slots.find(Generation(1)) is None
    assert slots.free == 1


def test_the_system_clock_has_a_monotonic_and_a_wall_side() -> None:
    clock = SystemClock()
    assert clock.now_s() <= clock.now_s()
    assert clock.wall_s() > 1.7e9
