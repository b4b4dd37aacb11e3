"""Builds the embedded model's tokenizer: byte-level BPE with 512 entries, digits one by one.

    python tools/build_tokenizer.py OUT

Writes tokenizer.json, tokenizer_config.json and chat_template.jinja in Hugging Face form.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from problems import sample
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # IDs 0, 1, 2
CORPUS_PROBLEMS = 20_000
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def render(question: str, solution: str | None = None) -> str:
    """The chat form of a question, open for its answer, or closed after the given solution."""
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return prompt if solution is None else f"{prompt}{solution}<|im_end|>\n"


def build(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def _corpus() -> Iterator[str]:
    rng = random.Random(1)
    for _ in range(CORPUS_PROBLEMS):
        question, solution, _ = sample(rng)
        yield render(question, solution)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the embedded model's tokenizer.")
    parser.add_argument("out", type=Path, help="folder to write to")
    arguments = parser.parse_args()
    tokenizer = build(arguments.out)
    question, solution, _ = sample(random.Random(2))
    ids = tokenizer(render(question, solution))["input_ids"]
    print(f"{len(tokenizer)} entries; an example of {len(ids)} tokens:\n{tokenizer.decode(ids)}")


if __name__ == "__main__":
    main()
