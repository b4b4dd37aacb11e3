"""Text to tokens and back, with the embedded checkpoint's tokenizer."""

import json
import random
from pathlib import Path

import pytest

from rlt.coordinator.text import CheckpointTokenizer, load_tokenizer
from rlt.runtime.errors import CheckpointError, InvalidRequest
from rlt.runtime.interfaces import ChatMessage

EMBEDDED = Path(__file__).parents[2] / "launch" / "embedded"
MIXED = "Grüße, 世界! 😀👩‍🚀 naïve π≈3.14 \n\tend"


@pytest.fixture(scope="module")
def tokenizer() -> CheckpointTokenizer:
    return CheckpointTokenizer(EMBEDDED)


def test_text_goes_through_tokens_and_back(tokenizer: CheckpointTokenizer) -> None:
    stream = tokenizer.decoder()
    assert stream.push(tokenizer.encode(MIXED)) + stream.finish() == MIXED


@pytest.mark.parametrize("seed", range(20))
def test_no_piece_ever_holds_half_a_character(tokenizer: CheckpointTokenizer, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("aé世😀 \n½7", k=300))
    tokens = tokenizer.encode(text)
    assert len(tokens) > len(text)  # characters do split over tokens here
    stream = tokenizer.decoder()
    pieces = []
    while tokens:
        take = rng.randint(1, 3)
        pieces.append(stream.push(tokens[:take]))
        del tokens[:take]
    pieces.append(stream.finish())
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


def test_a_character_that_never_completes_comes_out_broken_at_the_end(
    tokenizer: CheckpointTokenizer,
) -> None:
    half = tokenizer.encode("😀")[:-1]
    stream = tokenizer.decoder()
    assert stream.push(tokenizer.encode("ok")) == "ok"
    assert stream.push(half) == ""
    assert set(stream.finish()) == {"\ufffd"}


def test_endless_broken_bytes_do_not_wait_for_ever(tokenizer: CheckpointTokenizer) -> None:
    lead = tokenizer.encode("😀")[0]
    stream = tokenizer.decoder()
    shown = "".join(stream.push([lead]) for _ in range(200)) + stream.finish()
    assert set(shown) == {"\ufffd"} and len(shown) > 100


def test_special_tokens_are_no_part_of_the_text(tokenizer: CheckpointTokenizer) -> None:
    stream = tokenizer.decoder()
    assert stream.push([*tokenizer.encode("42"), 2]) + stream.finish() == "42"


def test_messages_are_rendered_by_the_chat_template(tokenizer: CheckpointTokenizer) -> None:
    tokens = tokenizer.render((ChatMessage("user", "What is 2+2?"),))
    start, end = 1, 2
    assert tokens == [
        start,
        *tokenizer.encode("user\nWhat is 2+2?"),
        end,
        *tokenizer.encode("\n"),
        start,
        *tokenizer.encode("assistant\n"),
    ]


def _copy_without_template(folder: Path, settings: dict[str, object]) -> None:
    (folder / "tokenizer.json").write_bytes((EMBEDDED / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_a_template_may_stand_in_the_tokenizer_config(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    bos = {"content": "<|im_start|>"}
    _copy_without_template(tmp_path, {"chat_template": template, "bos_token": bos})
    tokenizer = CheckpointTokenizer(tmp_path)
    tokens = tokenizer.render((ChatMessage("user", "hi"), ChatMessage("user", "ho")))
    assert tokens == [1, *tokenizer.encode("hiho")]


def test_without_a_template_messages_are_refused_by_name(tmp_path: Path) -> None:
    _copy_without_template(tmp_path, {})
    with pytest.raises(InvalidRequest, match="no chat template"):
        CheckpointTokenizer(tmp_path).render((ChatMessage("user", "hi"),))


def test_a_template_cannot_reach_outside_its_sandbox(tmp_path: Path) -> None:
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    _copy_without_template(tmp_path, {"chat_template": escape})
    with pytest.raises(InvalidRequest, match="refuses"):
        CheckpointTokenizer(tmp_path).render((ChatMessage("user", "hi"),))


def test_a_template_can_refuse_messages_in_its_own_words(tmp_path: Path) -> None:
    _copy_without_template(tmp_path, {"chat_template": "{{ raise_exception('roles!') }}"})
    with pytest.raises(InvalidRequest, match="roles!"):
        CheckpointTokenizer(tmp_path).render((ChatMessage("user", "hi"),))


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        CheckpointTokenizer(tmp_path)


def test_a_folder_without_tokenizer_gives_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(None) is None
