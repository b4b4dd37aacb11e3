"""What the simulated model answers when one request runs alone, position by position, loop by loop.

No scheduler, no blocks, no batch: only the design's rules and the made-up model's arithmetic.
"""

from rlt.runtime.types import EngineRequest, ExitSettings, FinishReason, KVLayout

from .simulated_executor import EOS, VOCAB, mix


class _Memory:
    """K/V values per plane and position."""

    def __init__(self, layout: KVLayout, num_loops: int) -> None:
        self.shared = layout == "shared"
        self.planes: list[dict[int, int]] = [{} for _ in range(1 if self.shared else num_loops)]

    def loop(self, position: int, depth: int, state: int) -> int:
        plane = self.planes[0 if self.shared else depth]
        plane[position] = mix(state, depth)
        for earlier in range(position + 1):
            state = mix(state, plane[earlier])
        return state

    def exited(self, position: int, exit_depth: int) -> None:
        for plane in self.planes[exit_depth:]:
            plane[position] = self.planes[exit_depth - 1][position]


def oracle(
    request: EngineRequest, layout: KVLayout = "last_exited", num_loops: int = 4
) -> tuple[list[int], list[int], FinishReason]:
    memory = _Memory(layout, num_loops)
    state = 0
    for position, token in enumerate(request.prompt):
        state = mix(token)
        for depth in range(num_loops):
            state = memory.loop(position, depth, state)
    tokens, depths = [_sample(request, state, 0)], [num_loops]
    while (finish := _finish(request, tokens)) is None:
        position, state = len(request.prompt) + len(tokens) - 1, mix(tokens[-1])
        states = []
        for depth in range(request.exit.max_loops):
            state = memory.loop(position, depth, state)
            states.append(state)
            if depth + 1 == _exit_depth(request.exit, len(tokens), states):
                break
        memory.exited(position, len(states))
        depths.append(len(states))
        tokens.append(_sample(request, state, len(tokens)))
    return tokens, depths, finish


def _exit_depth(exits: ExitSettings, output_index: int, states: list[int]) -> int:
    """Loops that the token runs as far as the states so far can tell: max_loops if no signal."""
    if exits.mode == "trace":
        return exits.trace[output_index]
    if exits.threshold >= 1.0:
        return exits.max_loops
    survival = 1.0
    for loop, state in enumerate(states, start=1):
        survival *= 1.0 - _score(state, 1)
        random = exits.mode == "random_lookahead"
        signal = _score(state, 2) if random else 1.0 - survival
        if loop >= exits.min_loops and signal >= exits.threshold:
            return min(loop if exits.mode == "ouro" else loop + 1, exits.max_loops)
    return exits.max_loops


def _score(state: int, head: int) -> float:
    return (mix(state, head) % 1000) / 1500


def _sample(request: EngineRequest, state: int, output_index: int) -> int:
    return mix(state, request.sampling.seed or 0, output_index) % VOCAB


def _finish(request: EngineRequest, tokens: list[int]) -> FinishReason | None:
    sampling, last = request.sampling, tokens[-1]
    if last in sampling.stop_token_ids or (last == EOS and not sampling.ignore_eos):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) >= sampling.max_tokens else None
