"""Whether a row of output can be the answer to what was asked. Pure.

A decode worker's word goes to clients and through the tokenizer, so what cannot be right ends the
one request that it speaks of.
"""

from ..connector.messages import OutputRow
from ..runtime.types import EngineRequest, FinishReason, ModelDescription


def row_fault(row: OutputRow, asked: EngineRequest, model: ModelDescription) -> str | None:
    """What is wrong with the row; None when nothing is."""
    count, limit = len(row.token_ids), asked.sampling.max_tokens
    if row.start_index < 0 or row.start_index + count > limit:
        return f"outputs {row.start_index}..{row.start_index + count} of at most {limit}"
    logprobs = count if asked.sampling.logprobs is not None else 0
    if (len(row.exit_depths), len(row.logprobs)) != (count, logprobs):
        return f"{count} tokens, {len(row.exit_depths)} depths, {len(row.logprobs)} logprobs"
    if not all(0 <= token < model.vocab_size for token in row.token_ids):
        return f"tokens outside the vocabulary of {model.vocab_size}: {row.token_ids}"
    if not all(1 <= depth <= model.num_loops for depth in row.exit_depths):
        return f"depths outside 1..{model.num_loops}: {row.exit_depths}"
    if row.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
        return f"{row.finish_reason} is no way for output to end"
    return None
