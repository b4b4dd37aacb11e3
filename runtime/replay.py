"""Replay: outputs that were delivered before run again as part of the context, at their own depths.

Pure rules over one request: what is refused, which positions take part in a loop, which have ended.
Plans no pass, and never shares what it speaks of: a replayed position is a generated one.
"""

from collections.abc import Iterator

from .types import Dtype, EngineRequest, ModelDescription, TokenRange

TIE = 1e-4  # what rounding may move in float32: nearer than this, either token may come out
TIES: dict[Dtype, float] = {"float32": TIE, "bfloat16": 0.1}  # bfloat16 keeps 8 bits of a logit


def replay_fault(request: EngineRequest, model: ModelDescription) -> str | None:
    """Why nobody can have delivered what the request says, or None."""
    if (fault := _delivered_fault(request, model)) is None:
        return None
    return f"generation {request.generation}: {fault}"


def _delivered_fault(request: EngineRequest, model: ModelDescription) -> str | None:
    tokens, depths, loops = request.delivered, request.delivered_depths, model.num_loops
    if len(tokens) != len(depths):
        return f"{len(tokens)} delivered tokens and {len(depths)} depths"
    if not tokens:
        return None
    if len(tokens) >= request.sampling.max_tokens:
        return f"{len(tokens)} of {request.sampling.max_tokens} outputs delivered: none is left"
    if depths[0] != loops:
        return f"output 0 was delivered with {depths[0]} loops; a prompt runs all {loops}"
    if not all(1 <= depth <= loops for depth in depths):
        return f"delivered depths {min(depths)} to {max(depths)}; the model has {loops} loops"
    if not all(0 <= token < model.vocab_size for token in tokens):
        return f"a delivered token outside the vocabulary of {model.vocab_size}"
    ends = set(request.sampling.stop_token_ids)
    if not request.sampling.ignore_eos:
        ends.update(model.eos_token_ids)
    if not ends.isdisjoint(tokens):
        return "a delivered token ends the request: nothing follows it"
    return None


def active_runs(
    request: EngineRequest, span: TokenRange, depth: int, num_loops: int
) -> tuple[TokenRange, ...] | None:
    """The longest runs of positions in `span` that run a loop at `depth`; None when all do."""
    if depth == 0 or span.stop <= len(request.prompt):
        return None
    runs: list[TokenRange] = []
    for position in range(span.start, span.stop):
        if request.context_loops(position, num_loops) <= depth:
            continue
        if runs and runs[-1].stop == position:
            runs[-1] = TokenRange(runs[-1].start, position + 1)
        else:
            runs.append(TokenRange(position, position + 1))
    return None if runs == [span] else tuple(runs)


def ended_positions(
    request: EngineRequest, span: TokenRange, loops: int, num_loops: int
) -> Iterator[int]:
    """Replayed positions in `span` that run exactly `loops` loops, fewer than all."""
    for position in range(max(span.start, len(request.prompt)), span.stop):
        if loops < num_loops and request.context_loops(position, num_loops) == loops:
            yield position
