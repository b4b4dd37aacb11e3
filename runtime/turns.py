"""Which kind of pass comes next, by the bounded rules of batching.

Owns how many prompt passes ran since the last loop pass. Picks no request and makes no row.
CODA before PRELUDE before loops; without refill, neither while any token still loops. Prompt passes
never stand between two loop passes more often than the bound says.
"""

from collections.abc import Iterable

from .config import SchedulerConfig
from .plans import Stage
from .request import Phase, Request

Ready = dict[Phase, list[Request]]  # executing requests by phase, in the order they started


def by_phase(requests: Iterable[Request]) -> Ready:
    ready: Ready = {}
    for request in requests:
        ready.setdefault(request.phase, []).append(request)
    return ready


class Turns:
    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._prompt_passes = 0  # since the last loop pass

    def choose(self, ready: Ready) -> Stage | None:
        """None: nothing can run before a result of what is in flight comes."""
        looping = Phase.NEEDS_LOOP in ready or Phase.AWAITS_SCORE in ready
        if self._config.refill or not looping:
            if Phase.NEEDS_CODA in ready:
                return Stage.CODA
            if Phase.NEEDS_PRELUDE in ready:
                return Stage.PRELUDE
        loops = Stage.RECURRENT if Phase.NEEDS_LOOP in ready else None
        if Phase.PREFILLING not in ready or (loops and self.mixes(ready)):
            return loops
        if looping and self._prompt_passes >= self._config.prefill_passes:
            return loops
        return Stage.PREFILL

    def mixes(self, ready: Ready) -> bool:
        """A loop pass takes prompt rows too: a whole chunk fits beside the decode rows."""
        config = self._config
        if not config.mixed_batches or Phase.PREFILLING not in ready:
            return False
        rows = len(ready.get(Phase.NEEDS_LOOP, ()))
        return config.token_budget is None or rows + config.chunk_tokens <= config.token_budget

    def ran(self, stage: Stage) -> None:
        if stage is Stage.PREFILL:
            self._prompt_passes += 1
        elif stage is Stage.RECURRENT:
            self._prompt_passes = 0
