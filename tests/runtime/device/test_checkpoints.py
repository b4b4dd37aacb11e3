"""Loading: every tensor accounted for, every damage named with tensor, file and a way out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlt.runtime.errors import CheckpointError
from rlt.runtime.models.registry import LoadedModel, load_model
from rlt.runtime.models.weights import load_weights

from .checkpoints import CKPT, changed_copy

Edit = Callable[[dict[str, Tensor]], None]
DOWN = "model.layers.1.mlp.down_proj.weight"


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(folder, **({"dtype": "auto", "device": "cpu"} | options))


def remove(*names: str) -> Edit:
    def edit(weights: dict[str, Tensor]) -> None:
        for name in names:
            del weights[name]

    return edit


def put(name: str, change: Callable[[dict[str, Tensor]], Tensor]) -> Edit:
    def edit(weights: dict[str, Tensor]) -> None:
        weights[name] = change(weights)

    return edit


def shard(folder: Path, **index_changes: str) -> Path:
    """The golden checkpoint in two files; index_changes move names in the index alone."""
    weights = load_file(CKPT / "model.safetensors")
    (folder / "config.json").write_text((CKPT / "config.json").read_text())
    weight_map: dict[str, str] = {}
    for number, part in enumerate((sorted(weights)[::2], sorted(weights)[1::2])):
        name = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file({key: weights[key] for key in part}, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map | index_changes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def hidden_after_embedding_and_head(loaded: LoadedModel) -> Tensor:
    with torch.inference_mode():
        return loaded.model.logits(loaded.model.embed(torch.arange(8)))


@pytest.mark.parametrize(
    "edit, named",
    [
        (remove(DOWN), DOWN),
        (remove("model.norm.weight", DOWN), DOWN),
        (put("model.extra.weight", lambda w: w[DOWN].clone()), "model.extra.weight"),
        (put(DOWN, lambda w: w[DOWN][:, :-1].contiguous()), DOWN),
        (put(DOWN, lambda w: w[DOWN].to(torch.int32)), DOWN),
        (remove("model.early_exit_gate.bias"), "early_exit_gate"),
        (
            remove("model.early_exit_gate.bias", "model.early_exit_gate.weight"),
            "early_exit_gate",
        ),
    ],
    ids=["missing", "two missing", "extra", "misshapen", "integers", "no gate bias", "no gate"],
)
def test_damage_is_named_with_tensor_and_file(tmp_path: Path, edit: Edit, named: str) -> None:
    folder = changed_copy(tmp_path, tensors=edit)
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        load(folder)
    assert named in str(caught.value)
    assert ";" in str(caught.value)  # what to do


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, 5000, 600_000])
def test_a_truncated_file_is_named(tmp_path: Path, kept_bytes: int) -> None:
    path = changed_copy(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged or cut off.*again"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name, text",
    [("config.json", None), ("config.json", "{"), ("config.json", "[]")],
    ids=["absent", "not JSON", "no object"],
)
def test_an_unreadable_config_is_named(tmp_path: Path, name: str, text: str | None) -> None:
    changed_copy(tmp_path)
    (tmp_path / name).unlink() if text is None else (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)


def test_absent_weights_are_named(tmp_path: Path) -> None:
    (changed_copy(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors does not exist"):
        load(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"partial_rotary_factor": 0.5},
        {"num_key_value_heads": 3},
        {"total_ut_steps": None},
        {"total_ut_steps": 0},
        {"hidden_size": "64"},
        {"rms_norm_eps": -1},
        {"eos_token_id": "</s>"},
    ],
    ids=str,
)
def test_config_values_that_would_change_the_maths_are_refused_by_key(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        load(changed_copy(tmp_path, config=changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_scaling": {"rope_type": "default"}},
        {"some_new_key": [1, 2]},
        {"sliding_window": 4096},
        {"hidden_act": "silu", "attention_bias": False},
    ],
    ids=str,
)
def test_unknown_and_harmless_keys_are_ignored(tmp_path: Path, changes: dict[str, Any]) -> None:
    loaded = load(changed_copy(tmp_path, config=changes))
    assert torch.equal(
        hidden_after_embedding_and_head(loaded), hidden_after_embedding_and_head(load(CKPT))
    )


def test_rope_theta_is_found_inside_rope_parameters(tmp_path: Path) -> None:
    changes = {"rope_theta": None, "rope_parameters": {"rope_theta": 777.0}}
    raw = json.loads((changed_copy(tmp_path, config=changes) / "config.json").read_text())
    del raw["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load(tmp_path).config.rope_theta == 777.0


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM.*OuroForCausalLM"):
        load(changed_copy(tmp_path, config={"architectures": ["LlamaForCausalLM"]}))


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    one, two = load(CKPT), load(shard(tmp_path))
    assert torch.equal(hidden_after_embedding_and_head(one), hidden_after_embedding_and_head(two))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (shard(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors does not exist"):
        load(tmp_path)


def test_an_index_that_disagrees_with_its_files_is_named(tmp_path: Path) -> None:
    names = sorted(load_file(CKPT / "model.safetensors"))
    shard(tmp_path, **{names[0]: "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=rf"index.json says that {names[0]}"):
        load(tmp_path)


def test_an_index_may_not_point_outside_the_folder(tmp_path: Path) -> None:
    shard(tmp_path, **{DOWN: "../elsewhere.safetensors"})
    with pytest.raises(CheckpointError, match="weight_map"):
        load(tmp_path)


def test_a_stored_inverse_frequency_buffer_is_ignored(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(changed_copy(tmp_path, tensors=put(name, lambda _: torch.ones(8))))


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    loaded = load(changed_copy(tmp_path, config=tied, tensors=remove("lm_head.weight")))
    embedding = load_file(CKPT / "model.safetensors")["model.embed_tokens.weight"]
    want = embedding[:8] @ embedding.T
    torch.testing.assert_close(hidden_after_embedding_and_head(loaded), want)
    assert load(CKPT).model.num_bytes - loaded.model.num_bytes == embedding.nbytes


def test_a_stored_head_must_equal_the_embedding_it_is_tied_to(tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    same = put("lm_head.weight", lambda w: w["model.embed_tokens.weight"].clone())
    load(changed_copy(tmp_path, config=tied, tensors=same))
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs"):
        load(changed_copy(tmp_path, config=tied))


def test_weights_are_cast_to_the_wanted_dtype(tmp_path: Path) -> None:
    assert load(CKPT).dtype == "float32"
    loaded = load(CKPT, dtype="bfloat16")
    assert loaded.dtype == "bfloat16"
    assert loaded.model.num_bytes * 2 == load(CKPT).model.num_bytes
    half = changed_copy(tmp_path, config={"torch_dtype": "float16"})
    with pytest.raises(CheckpointError, match=r"float16.*--dtype"):
        load(half)
    assert load(half, dtype="float32").dtype == "float32"


def test_num_bytes_counts_each_weight_once() -> None:
    weights = load_file(CKPT / "model.safetensors")
    assert load(CKPT).model.num_bytes == sum(tensor.nbytes for tensor in weights.values())


def test_the_same_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    shard(tmp_path)
    second = tmp_path / "model-00002-of-00002.safetensors"
    weights = load_file(second)
    name = sorted(load_file(CKPT / "model.safetensors"))[0]
    save_file(weights | {name: load_file(CKPT / "model.safetensors")[name]}, second)
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)


def test_nothing_wanted_means_every_tensor_is_extra() -> None:
    with pytest.raises(CheckpointError, match="not part of this architecture"):
        load_weights(CKPT, [])


def test_eos_ids_of_both_configs_are_joined(tmp_path: Path) -> None:
    changed_copy(tmp_path, config={"eos_token_id": [7, 3]})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9]}))
    assert load(tmp_path).description.eos_token_ids == (7, 3, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert load(tmp_path).description.eos_token_ids == (7, 3, 5)


def test_the_description_states_what_admission_needs(tmp_path: Path) -> None:
    folder = changed_copy(tmp_path / "name", config={"early_exit_threshold": 0.7})
    description = load(folder, max_positions=100).description
    assert description.name == "name"
    assert (description.vocab_size, description.num_loops) == (512, 4)
    assert description.max_positions == 100
    assert load(folder, max_positions=10_000).description.max_positions == 512
    assert description.default_exit_threshold == 0.7


def test_the_fingerprint_sees_weights_and_maths_but_not_the_folder(tmp_path: Path) -> None:
    def digest(folder: Path) -> str:
        return load(folder).description.fingerprint

    plain = digest(CKPT)
    assert digest(changed_copy(tmp_path / "same")) == plain
    assert digest(changed_copy(tmp_path / "theta", config={"rope_theta": 5e5})) != plain
    nudged = put(DOWN, lambda w: w[DOWN] + 1e-3)
    assert digest(changed_copy(tmp_path / "nudged", tensors=nudged)) != plain


def test_a_large_checkpoint_is_sampled_and_changes_still_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlt.runtime.models import fingerprint

    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", 16_384)
    plain = load(CKPT).description.fingerprint
    nudged = put(DOWN, lambda w: w[DOWN] + 1e-3)
    assert load(changed_copy(tmp_path, tensors=nudged)).description.fingerprint != plain
