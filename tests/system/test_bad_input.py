"""Wrong input to a running service and to its start: a named error, and the service goes on."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from safetensors.torch import load_file, save_file

from rlt.coordinator.client import Client
from rlt.runtime.errors import DuplicateRequest, InvalidRequest, RltError, TooLong
from rlt.runtime.interfaces import GenerateRequest
from rlt.runtime.types import RequestId

from .service import GOLDEN, Service, running

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(1, 1, "--num-blocks", "64", "--threads", "1") as service:
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with service.client() as client:
        yield client
        assert len(client.generate([5, 6, 7], max_tokens=3, ignore_eos=True).token_ids) == 3


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        ([], {}, InvalidRequest, "prompt"),
        ([5, 512], {}, InvalidRequest, "512"),
        ([-1], {}, InvalidRequest, "-1"),
        ([5] * 500, {"max_tokens": 100}, TooLong, "512"),  # the model's positions
        ([5] * 200, {"max_tokens": 100}, TooLong, "--num-blocks"),  # the pool
        ([5], {"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ([5], {"temperature": -1.0}, InvalidRequest, "temperature"),
        ([5], {"temperature": float("nan")}, InvalidRequest, "temperature"),
        ([5], {"top_p": 0.0}, InvalidRequest, "top_p"),
        ([5], {"top_k": -2}, InvalidRequest, "top_k"),
        ([5], {"exit_threshold": 1.5}, InvalidRequest, "exit_threshold"),
        ([5], {"max_loops": 5}, InvalidRequest, "max_loops"),
        ([5], {"min_loops": 3, "max_loops": 2}, InvalidRequest, "min_loops"),
        ([5], {"logprobs": 1000}, InvalidRequest, "logprobs"),
        ([5], {"deadline_s": -1.0}, InvalidRequest, "deadline_s"),
        ("text", {}, InvalidRequest, "tokenizer"),  # the golden checkpoint has none
    ],
)
def test_a_wrong_request_is_refused_by_name(
    client: Client, prompt: Any, options: dict[str, Any], error: type[RltError], words: str
) -> None:
    with pytest.raises(error) as raised:
        client.generate(prompt, **options)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "options", [{"max_tokens": "many"}, {"temperature": "hot"}, {"min_loops": 1.5}]
)
def test_a_wrong_type_is_refused_by_name(client: Client, options: dict[str, Any]) -> None:
    [field] = options
    with pytest.raises(RltError, match=field):
        client.generate([5], **options)


def test_a_live_request_id_cannot_be_used_twice_and_the_first_goes_on(client: Client) -> None:
    request = GenerateRequest(request_id=RequestId("twice"), prompt_token_ids=(5, 6))
    stream = client.generate(
        [5, 6], stream=True, max_tokens=100, ignore_eos=True, request_id="twice"
    )
    with pytest.raises(DuplicateRequest, match="twice"):
        client.submit(request)
    assert sum(len(delta.token_ids) for delta in stream) == 100


def test_malformed_frames_are_counted_and_hurt_nobody(service: Service, client: Client) -> None:
    before = client.statistics()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(service.address)
    for frames in ([b""], [b"\xc1"], [b"{}"], [b"\x80"], [b"a", b"b"], [b"x" * 100_000]):
        socket.send_multipart(frames)
    good = [b"\x81\xa4type\xa5hello"]
    socket.send_multipart(good)
    assert socket.poll(5000), "a good frame after bad ones was not answered"
    socket.close(0)
    context.term()
    assert client.generate([5], max_tokens=2, ignore_eos=True).token_ids
    after = client.statistics()
    assert _malformed(after) == _malformed(before) + 6


def _malformed(statistics: dict[str, Any]) -> int:
    return int(sum(v for k, v in statistics.items() if "malformed" in k))


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "rlt.launch.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def damaged(folder: Path, damage: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(GOLDEN, folder / "ckpt")
    tensors = load_file(folder / "ckpt" / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "ckpt" / "model.safetensors")
    return folder / "ckpt"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj"),
        pytest.param(
            lambda t: t.pop("model.early_exit_gate.weight"),
            "early_exit_gate",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            lambda t: t.update({"model.extra": t["model.norm.weight"].clone()}),
            "model.extra",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1].clone()}),
            "lm_head.weight",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_damaged_checkpoint_ends_the_start_with_its_name(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], words: str
) -> None:
    ended = start("--model", str(damaged(tmp_path, damage)), "--runtime-dir", str(tmp_path / "r"))
    assert ended.returncode == 2
    assert words in ended.stderr + ended.stdout and "Traceback" not in ended.stderr


@pytest.mark.soak
def test_a_truncated_checkpoint_ends_the_start_with_its_name(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "ckpt")
    weights = tmp_path / "ckpt" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    ended = start("--model", str(tmp_path / "ckpt"), "--runtime-dir", str(tmp_path / "r"))
    assert ended.returncode == 2
    assert "model.safetensors" in ended.stderr and "Traceback" not in ended.stderr


def test_a_model_that_is_not_looped_is_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "ckpt")
    config = json.loads((GOLDEN / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "ckpt" / "config.json").write_text(json.dumps(config))
    ended = start("--model", str(tmp_path / "ckpt"), "--runtime-dir", str(tmp_path / "r"))
    assert ended.returncode == 2 and "LlamaForCausalLM" in ended.stderr


def test_an_address_in_use_is_named(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    ended = start("--listen", f"tcp://127.0.0.1:{port}", "--runtime-dir", str(tmp_path))
    socket.close(0)
    context.term()
    assert ended.returncode == 2
    assert f"127.0.0.1:{port}" in ended.stderr and "Traceback" not in ended.stderr


def test_an_unknown_option_is_named() -> None:
    ended = start("--prefil", "1")
    assert ended.returncode == 2 and "--prefil" in ended.stderr
