"""What one worker process does when peers, the coordinator or its own memory fail it."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from rlt.connector.codec import Decoder, encode
from rlt.connector.config import EXIT_RESTART
from rlt.connector.messages import (
    Cancel,
    Commit,
    Drain,
    GenerationFailed,
    GenerationReleased,
    Heartbeat,
    MustWait,
    PairClosed,
    PairHello,
    PairReady,
    PairWelcome,
    Peer,
    Peers,
    Prefill,
    PrefillAccepted,
    PrefillToDecode,
    Refused,
    Register,
    RegisterAgain,
    RegisterRefused,
    Reserve,
    Reserved,
    Shutdown,
    WriterEnded,
)
from rlt.connector.nixl_transport import NixlTransport
from rlt.connector.worker_connector import WorkerConnector
from rlt.runtime.clock import SystemClock
from rlt.runtime.events import Reservation
from rlt.runtime.types import (
    AllocationId,
    EngineRequest,
    ExitSettings,
    Generation,
    SamplingParams,
)

from ..connector.pools import canary_pools
from .lone_worker import EPOCH, FIRST, lone_worker

pytestmark = pytest.mark.system

P, D = "prefill-0-aaaaaaaaaaaa", "decode-0-bbbbbbbbbbbb"
OTHER = "prefill-1-bbbbbbbbbbbb"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rlt-l") as path:
        yield Path(path)


def request(generation: Generation = FIRST, prompt: int = 40) -> EngineRequest:
    return EngineRequest(
        generation=generation,
        prompt=tuple(range(5, 5 + prompt)),
        sampling=SamplingParams(max_tokens=4, seed=1),
        exit=ExitSettings(threshold=1.0, min_loops=1, max_loops=4),
    )


def reserve(generation: Generation = FIRST, prompt: int = 40, prefill: str = P) -> Reserve:
    return Reserve(generation=generation, request=request(generation, prompt), prefill=prefill)


def listing(version: int, *incarnations: str, role: str = "prefill", endpoint: str = "") -> Peers:
    peers = (
        Peer(worker=i[:-13], incarnation=i, role=role, endpoint=endpoint) for i in incarnations
    )
    return Peers(version=version, peers=tuple(peers))


def figure(name: str, wanted: float) -> Callable[[Heartbeat], bool]:
    return lambda beat: beat.statistics[name] == wanted


def test_memory_of_an_expelled_writer_comes_back_when_its_process_is_reaped(folder: Path) -> None:
    with lone_worker("decode", folder, incarnation=D) as d:
        assert d.welcome().incarnation == D, "whoever starts it names it"
        d.say(reserve())
        assert d.hears(Refused).code == "pair_closed", "nobody knows that prefill worker"
        d.say(listing(1, P))
        d.say(reserve())
        d.hears(Reserved)
        d.say(listing(2))
        failed, released = d.hears(GenerationFailed), d.hears(GenerationReleased)
        assert failed.code == "transfer_failed" and released.quarantined_blocks == 12
        beat = d.hears(Heartbeat, figure("blocks_quarantined", 12))
        assert beat.quarantined_from == (P,) and beat.live == ()
        assert beat.statistics["slots_withdrawn"] == 1
        d.say(Cancel(generation=FIRST))
        d.hears(GenerationReleased)
        d.dead = (P,)
        beat = d.hears(Heartbeat, figure("blocks_quarantined", 0))
        assert beat.quarantined_from == () and beat.statistics["slots_withdrawn"] == 0
        assert beat.statistics["blocks_free"] == 64 and beat.statistics["late_handoff_events"] == 0
        d.oldest_live = Generation((EPOCH + 1) << 40)  # of no epoch that it was told of
        d.hears(Heartbeat)
        d.hears(Heartbeat)
        d.say(listing(3, P))
        d.say(reserve(Generation(FIRST + 1)))
        d.hears(Reserved)
        d.say(Shutdown(restart=True))
        assert d.exit_code() == EXIT_RESTART


def test_a_decode_worker_with_too_much_quarantined_takes_nothing_more_and_goes(
    folder: Path,
) -> None:
    with lone_worker("decode", folder, max_quarantined=0.3) as d:
        d.welcome()
        d.say(listing(1, P, OTHER))
        kept, lost = FIRST, Generation(FIRST + 1)
        d.say(reserve(kept, 20, OTHER))
        d.hears(Reserved)
        d.say(reserve(lost, 80))
        d.hears(Reserved)
        d.say(listing(2, OTHER))
        beat = d.hears(Heartbeat, figure("blocks_quarantined", 24))
        assert not beat.draining, "a dead writer is soon reaped, and then all comes back"
        beat = d.hears(Heartbeat, lambda beat: beat.draining)
        assert beat.statistics["blocks_quarantined"] > 0.3 * 64
        d.say(reserve(Generation(FIRST + 2), prefill=OTHER))
        assert "quarantined" in d.hears(MustWait).reason
        d.say(listing(3))
        assert d.exit_code() == EXIT_RESTART, "it ends when it holds nothing"


def test_a_worker_serves_another_coordinator_and_forgets_what_the_first_one_gave(
    folder: Path,
) -> None:
    with lone_worker("decode", folder) as d:
        first = d.welcome()
        assert (first.highest_epoch, first.live) == (0, ())
        d.say(listing(5, P))
        d.hears(Heartbeat, lambda beat: beat.peers_version == 5)
        later = Generation(((EPOCH + 2) << 40) + 1)  # the first one's epoch rose after the welcome
        d.say(reserve(later))
        d.hears(Reserved)
        d.say(Drain(to="end"))
        d.say(RegisterAgain())
        d.say(RegisterAgain())
        again = d.hears(Register)
        assert again.incarnation == first.incarnation and again.live == (later,)
        assert (first.drain, again.drain) == (None, "end")
        assert again.highest_epoch == EPOCH + 2
        d.welcome(EPOCH + 3)
        beat = d.hears(Heartbeat)
        assert beat.peers_version == 0 and [row.phase for row in beat.live] == ["cancelling"]
        d.say(Cancel(generation=later, writer_never_started=True))
        d.hears(GenerationReleased)
        beat = d.hears(Heartbeat)
        assert beat.live == () and beat.statistics["blocks_free"] == 64


def test_who_is_refused_at_the_start_cannot_start_and_who_is_expelled_later_failed(
    folder: Path,
) -> None:
    """The difference decides whether its supervisor starts it again."""
    for welcomed, code in ((False, 2), (True, 1)):
        with lone_worker("prefill", folder) as p:
            if welcomed:
                p.welcome()
            else:
                p.hears(Register)
            p.say(RegisterRefused(reason="its weights differ"))
            assert p.exit_code() == code


def test_a_worker_that_is_terminated_drains_until_it_is_told_to_end(folder: Path) -> None:
    with lone_worker("decode", folder) as d:
        d.welcome()
        d.say(listing(1, P))
        d.say(reserve())
        d.hears(Reserved)
        d.terminate()
        began_s = time.monotonic()
        beat = d.hears(Heartbeat, lambda beat: beat.draining)
        assert time.monotonic() - began_s < 2.0 and len(beat.live) == 1
        d.hears(Heartbeat, lambda beat: beat.draining)
        d.say(Cancel(generation=FIRST, writer_never_started=True))
        d.hears(GenerationReleased)
        d.hears(Heartbeat, lambda beat: not beat.live)
        assert d.process.poll() is None, "nobody has told it to end"
        d.say(Shutdown(restart=True))
        assert d.exit_code() == EXIT_RESTART


def test_a_draining_worker_whose_coordinator_is_silent_ends_by_itself_when_idle(
    folder: Path,
) -> None:
    with lone_worker("prefill", folder, reconnect_s=60.0) as p:
        p.welcome()
        p.hears(Heartbeat)
        p.answers = False
        p.terminate()
        assert p.exit_code() == EXIT_RESTART


def test_a_worker_that_no_coordinator_has_welcomed_ends_at_once_and_is_to_be_started_again(
    folder: Path,
) -> None:
    with lone_worker("decode", folder, reconnect_s=60.0) as d:
        d.hears(Register)
        d.terminate()
        assert d.exit_code() == EXIT_RESTART


def test_the_second_sigterm_ends_a_worker_at_once(folder: Path) -> None:
    with lone_worker("decode", folder) as d:
        d.welcome()
        d.say(listing(1, P))
        d.say(reserve())
        d.hears(Reserved)
        d.terminate()
        d.hears(Heartbeat, lambda beat: beat.draining)
        d.terminate()
        assert d.exit_code() == EXIT_RESTART


class PlayedDecode:
    """A decode worker's socket and memory; what it says is up to the test."""

    def __init__(self, folder: Path, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.endpoint = f"ipc://{folder}/played.sock"
        self.router = context.socket(zmq.ROUTER)
        self.router.set(zmq.LINGER, 0)
        self.router.bind(self.endpoint)
        self.connector: WorkerConnector | None = None
        self._decoder: Decoder[object] = Decoder(PrefillToDecode)
        self.peer = b""

    def hears(self, kind: type[msgspec.Struct]) -> object:
        end_s = time.monotonic() + 20.0
        while time.monotonic() < end_s:
            self.progress()
            if self.router.poll(1):
                self.peer, frame = self.router.recv_multipart()
                message = self._decoder.decode(frame)
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__}")

    def progress(self) -> None:
        """Bytes and notifications of NIXL move only when somebody asks for them."""
        if self.connector is not None:
            self.connector.poll()

    def welcome(self) -> None:
        hello = self.hears(PairHello)
        assert isinstance(hello, PairHello)
        if self.connector is None:
            shape = hello.pool.geometry
            self.pools = canary_pools(shape, blocks=32, rows=2)
            transport = NixlTransport(self.pools.kv, self.pools.hidden, shape, name=D)
            self.connector = WorkerConnector(
                transport, clock=SystemClock(), max_inflight_bytes=1 << 20, transfer_timeout_s=9.0
            )
        metadata = self.connector.accept_peer(self.peer.decode(), hello.agent_metadata, hello.pool)
        answer = PairWelcome(incarnation=D, pool=self.connector.pool, agent_metadata=metadata)
        self.router.send_multipart([self.peer, encode(answer)])


def prefill(generation: Generation, tokens: int = 40) -> Prefill:
    blocks = -(-tokens // 16)
    tables = tuple(tuple(range(d * blocks, (d + 1) * blocks)) for d in range(4))
    reservation = Reservation(
        allocation=AllocationId(1), tables=tables, hidden_slot=0, cached_tokens=0
    )
    return Prefill(
        generation=generation,
        request=request(generation, tokens),
        decode=D,
        reservation=reservation,
    )


@pytest.mark.soak  # tests/faults/test_lone_engines.py leaves commits unanswered in every run
def test_a_pair_whose_commit_is_not_answered_is_closed_first_and_opened_anew(
    folder: Path,
) -> None:
    """The coordinator must know before it hears of the failure, or it chooses the pair again."""
    with (
        zmq.Context() as context,
        lone_worker("prefill", folder, transfer_timeout_s=1.5) as p,
    ):
        played = PlayedDecode(folder, context)
        with played.router:
            p.welcome()
            p.say(listing(1, D, role="decode", endpoint=played.endpoint))
            played.welcome()
            p.meanwhile = played.progress
            assert p.hears(PairReady).decode == D
            for attempt in range(2):
                generation = Generation(FIRST + attempt)
                p.say(prefill(generation))
                p.hears(PrefillAccepted)
                commit = played.hears(Commit)
                p.heard.clear()
                closed = p.hears(PairClosed)
                assert not closed.refused and "commit" in closed.reason
                assert p.kinds()[:-1] in ([], ["PrefillComplete"])
                assert p.hears(GenerationFailed).code == "transfer_failed"
                p.hears(GenerationReleased)
                ended = played.hears(WriterEnded)
                assert isinstance(commit, Commit) and isinstance(ended, WriterEnded)
                assert ended.posted == len(commit.chunks)
                p.say(prefill(Generation(FIRST + 100 + attempt)))
                assert p.hears(Refused).code == "pair_closed"
                played.welcome()
                assert p.hears(PairReady).decode == D
            beat = p.hears(Heartbeat, figure("handles_in_flight", 0))
            assert beat.statistics["blocks_free"] == 64 and beat.live == ()
            p.say(RegisterAgain())
            p.welcome(EPOCH + 1)
            assert p.hears(PairReady).decode == D, "said again to whoever is new"
            assert played.connector is not None
            played.connector.close()


def test_a_decode_worker_that_goes_holds_nothing_of_a_prefill_worker(folder: Path) -> None:
    with zmq.Context() as context, lone_worker("prefill", folder) as p:
        played = PlayedDecode(folder, context)
        with played.router:
            p.welcome()
            p.say(listing(1, D, role="decode", endpoint=played.endpoint))
            played.welcome()
            p.meanwhile = played.progress
            p.hears(PairReady)
            p.say(prefill(FIRST))
            played.hears(Commit)  # which it never answers
            p.say(listing(2, role="decode"))
            p.hears(GenerationReleased)
            beat = p.hears(Heartbeat)
            assert beat.statistics["blocks_free"] == 64 and beat.live == ()
            assert played.connector is not None
            played.connector.close()
