"""What D knows of one receive: its phase, and the facts that decide whether its memory is written.

Facts stay facts and never stand for a phase: what was promised, what arrived, what is known of the
writer. Written by the Receiver alone; pure.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from ..runtime.errors import ProtocolError
from ..runtime.types import Generation, Stamp, TokenRange
from .messages import Commit

MOST_WORDS = 256  # of one stamp: the event's name and the worker's


class Phase(Enum):
    RECEIVING = auto()
    STOPPING = auto()  # will not complete; waits for proof that the writer has ended
    RECEIVED = auto()
    QUARANTINED = auto()  # as STOPPING, but the request is over: only its memory still waits
    ENDED = auto()  # nothing arrives any more and nothing was activated


MOVES = {
    Phase.RECEIVING: {Phase.RECEIVED, Phase.STOPPING, Phase.ENDED},
    Phase.STOPPING: {Phase.ENDED, Phase.QUARANTINED},
    Phase.QUARANTINED: {Phase.ENDED},
    Phase.RECEIVED: set(),
    Phase.ENDED: set(),
}


@dataclass
class ReceiveRecord:
    generation: Generation
    peer: str
    allocation: int
    missing: TokenRange  # positions that D lacks and P must send
    max_chunks: int  # no honest peer sends more
    phase: Phase = Phase.RECEIVING
    arrived: dict[int, float] = field(default_factory=dict)  # sequence -> when
    commit: Commit | None = None
    writer_posted: int | None = None  # fact: the writer ended after this many sequences
    agent_destroyed: bool = False  # fact: of D's, the one that faced the writer
    writer_dead: bool = False  # fact: its process was reaped
    stopped_at_s: float = 0.0
    told_at_s: float = 0.0
    stamps: list[Stamp] = field(default_factory=list)

    def believable(self, commit: Commit) -> bool:
        """Whether it has no more chunks and stamps than there can be, and none that is a book: D
        passes the stamps on."""
        return (
            len(commit.chunks) <= self.max_chunks
            and len(commit.stamps) <= 4 * self.max_chunks + 64
            and all(len(stamp.event) + len(stamp.worker) <= MOST_WORDS for stamp in commit.stamps)
        )

    def move(self, to: Phase) -> None:
        if to not in MOVES[self.phase]:
            raise ProtocolError(f"generation {self.generation}: {self.phase.name} -> {to.name}")
        self.phase = to

    def all_arrived(self, sequences: int) -> bool:
        return all(sequence in self.arrived for sequence in range(sequences))

    def complete(self) -> bool:
        """Everything that was reserved is in."""
        return self.commit is not None and self.all_arrived(len(self.commit.chunks))

    def writer_done(self) -> bool:
        """Whether P is known to write no more into this reservation: everything that it posted has
        arrived, or it is fenced."""
        if self.agent_destroyed and self.writer_dead:
            return True
        if self.writer_posted is not None:
            return self.all_arrived(self.writer_posted)
        return self.complete()
