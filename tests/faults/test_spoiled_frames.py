"""Bad frames on every connection between the processes of a service, under their own identities.

Meanwhile a request may fail, by name; nobody may fall, hang or hold anything afterwards, and what
is asked then is answered rightly.
"""

import contextlib
import threading
from collections.abc import Iterator

import pytest

from rlt.coordinator.client import Client
from rlt.runtime.errors import RltError

from ..system.requests import sixty_four
from ..system.service import eventually
from .answers import answers, local_answers
from .faults import Faults, chosen_seed, faulty
from .rules import Rule
from .spoiling import HEARD, Spoiler

pytestmark = pytest.mark.system
REQUESTS = sixty_four()[:24]


@contextlib.contextmanager
def load(faults: Faults) -> Iterator[list[str]]:
    """An ordinary client that asks one thing after the other; how each ended."""
    stop, ends = threading.Event(), list[str]()

    def ask() -> None:
        with faults.client() as client:
            while not stop.is_set():
                try:
                    client.generate([5, 6, len(ends) % 500], max_tokens=6, deadline_s=20.0)
                    ends.append("")
                except RltError as error:
                    ends.append(error.code)

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    try:
        yield ends
    finally:
        stop.set()
        for thread in asking:
            thread.join(60.0)
    assert not any(thread.is_alive() for thread in asking), "a request hangs"


def spoil(faults: Faults, seed: int, frames: int) -> Spoiler:
    spoiler = Spoiler(seed, rate=0.5)
    rule = faults.add(Rule("spoil", bad=spoiler))
    with load(faults) as ends:
        with faults.client() as client:
            while sum(spoiler.sent.values()) < frames:
                client.stats()
                threading.Event().wait(0.2)
            for to in HEARD:  # both ways of two connections
                spoiler.oversize.add(to)
                eventually(lambda: not spoiler.oversize, f"a frame passes to {to}")
    faults.release(rule)
    assert ends.count("") > 3, f"hardly anything was served: {ends}"
    return spoiler


def unharmed(faults: Faults, client: Client) -> None:
    faults.ready(client, 1)
    assert answers(client, REQUESTS) == local_answers(REQUESTS)
    faults.at_rest(client, 60.0)
    assert faults.canary_hits(client) == 0
    assert not [line for line in faults.service.log if "Traceback" in line]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 3))])
def test_bad_frames_from_authentic_peers_end_nobody(seed: int) -> None:
    with faulty(seed=chosen_seed(seed)) as faults, faults.client() as client:
        spoiler = spoil(faults, faults.seed, 250)
        reached = {name.rpartition(" ")[2] for name in spoiler.sent}
        assert reached == set(HEARD)
        unharmed(faults, client)
        workers = faults.service.workers(client)
        counted = {name: w["malformed_frames"] for name, w in workers.items()}
        counted["coordinator"] = client.statistics()["malformed_frames"]  # type: ignore[assignment]
        assert all(counted.values()), f"not counted: {counted}"
