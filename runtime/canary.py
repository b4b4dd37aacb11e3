"""A pattern in every free KV block: an alarm, for tests and debugging, when somebody writes there.

Owns which free blocks carry the pattern and how often it was found broken. Decides nothing: a block
whose pattern is broken is reported and used all the same. A quiet pattern proves nothing.
Filling is a job of the compute thread, behind all that may still read a block's old content; a
grant waits for it, so that no fill can meet its new owner's bytes.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from .compute_thread import ComputeThread
from .errors import WorkerError

logger = logging.getLogger(__name__)

WORD = -1  # all bits set: a NaN in every dtype, so that whoever reads it gets no number
WORD_BYTES = 2
SWEEP_BYTES = 1 << 20  # looked at in one sweep: more at once costs memory, and the worker time


class Canary:
    """The BlockWatch Protocol. Made before the first block is granted; for one caller thread."""

    def __init__(self, kv: Tensor, compute: ComputeThread) -> None:
        self._words = kv.view(torch.int16).view(kv.shape[0], -1)
        self._compute = compute
        self._sweep_blocks = max(1, SWEEP_BYTES // self._words[0].nbytes)
        self._filling: deque[tuple[int, tuple[int, ...]]] = deque()  # (fill's number, its blocks)
        self._begun = 0
        self._filled = 0  # written by the compute thread alone
        self._words.fill_(WORD)
        self._finish_writing()
        # Next to be looked at first.
        self._watched: OrderedDict[int, None] = OrderedDict.fromkeys(range(kv.shape[0]))
        self.hits = 0

    def freed(self, blocks: Sequence[int]) -> None:
        chosen = tuple(blocks)
        self._begun += 1
        try:
            self._compute.post(lambda: self._fill(chosen), "a canary fill")
        except WorkerError:
            return  # the engine ends, and grants nothing more
        self._filling.append((self._begun, chosen))

    def granted(self, blocks: Sequence[int]) -> None:
        self._note_filled()
        if any(block not in self._watched for block in blocks):
            self._compute.synchronize()
            self._note_filled()
        self._look(blocks, "granted")
        for block in blocks:
            self._watched.pop(block, None)

    def sweep(self) -> None:
        self._note_filled()
        chosen = list(islice(self._watched, self._sweep_blocks))
        self._look(chosen, "looked at")
        for block in chosen:
            self._watched.move_to_end(block)

    def _fill(self, blocks: tuple[int, ...]) -> None:
        try:
            self._words.index_fill_(0, self._index(blocks), WORD)
            self._finish_writing()
        except Exception:
            logger.exception("filling %d free blocks failed: expect false alarms", len(blocks))
        finally:
            self._filled += 1

    def _note_filled(self) -> None:
        while self._filling and self._filling[0][0] <= self._filled:
            _, blocks = self._filling.popleft()
            self._watched.update(dict.fromkeys(blocks))

    def _look(self, blocks: Sequence[int], when: str) -> None:
        """Report each block whose pattern is broken, and mend it: one write, one report."""
        if not blocks:
            return
        broken = self._words.index_select(0, self._index(blocks)) != WORD
        for row in broken.any(dim=1).nonzero().flatten().tolist():
            self._report(blocks[row], broken[row].nonzero().flatten(), when)
            self._words[blocks[row]] = WORD
        self._finish_writing()

    def _report(self, block: int, words: Tensor, when: str) -> None:
        self.hits += 1
        logger.error(
            "canary: block %d was written while it was free (seen when it was %s): "
            "%d words differ, from byte %d to byte %d",
            block,
            when,
            len(words),
            int(words[0]) * WORD_BYTES,
            int(words[-1]) * WORD_BYTES + WORD_BYTES - 1,
        )

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._words.device)

    def _finish_writing(self) -> None:
        if self._words.is_cuda:
            torch.cuda.current_stream().synchronize()
