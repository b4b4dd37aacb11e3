"""What only NIXL owes: silence, no cost when idle, and agents that are really destroyed."""

import logging
import os
import random
import time
from contextlib import closing

import pytest
from nixl import _bindings  # type: ignore[import-untyped]
from nixl._api import nixl_agent  # type: ignore[import-untyped]

from rlt.connector.nixl_transport import NixlTransport, describe
from rlt.runtime.errors import ProtocolError, RltError, TransportError

from .pools import Pools, canary_pools, geometry

SHAPE = geometry()


def transport(name: str) -> NixlTransport:
    pools = canary_pools(SHAPE, blocks=4, rows=2)
    return NixlTransport(pools.kv, pools.hidden, SHAPE, name=name)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_removing_a_source_destroys_the_agent_that_faced_it() -> None:
    with closing(transport("p")) as writer, closing(transport("d")) as reader:
        metadata = writer.agent_metadata()
        before = open_files()
        reader.add_source("p", metadata)
        of_one_agent = open_files() - before
        for _ in range(5):
            reader.remove_source("p")
            reader.add_source("p", metadata)
            writer.poll_finished()  # lets go of the connection that the old agent had made
        assert open_files() - before < 2 * of_one_agent


def test_closing_destroys_every_agent() -> None:
    def pair_and_close() -> None:
        with closing(transport("p")) as writer, closing(transport("d")) as reader:
            metadata = reader.add_source("p", writer.agent_metadata())
            writer.add_target("d", metadata, reader.pool)

    pair_and_close()
    before = open_files()
    pair_and_close()
    assert open_files() == before


def test_damaged_metadata_is_refused_before_nixl_believes_it() -> None:
    """Unchecked, one in a few hundred of these ends the process in UCX, or is taken for good."""
    draw = random.Random(7)
    with closing(transport("p")) as writer, closing(transport("d")) as reader:
        good = reader.add_source("p", writer.agent_metadata())
        for _ in range(500):
            bad = bytearray(good)
            for _ in range(draw.choice((1, 2, 8, 50))):
                place = draw.randrange(len(bad))
                bad[place] = (bad[place] + draw.randrange(1, 256)) % 256
            if bytes(bad) == good:
                continue
            with pytest.raises(ProtocolError, match="damaged"):
                writer.add_target("d", bytes(bad[: draw.randint(0, len(bad))]), reader.pool)
        writer.add_target("d", good, reader.pool)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (_bindings.nixlBackendError, TransportError),
        (_bindings.nixlRemoteDisconnectError, TransportError),
        (_bindings.nixlUnknownError, TransportError),
        (_bindings.nixlMismatchError, ProtocolError),
        (_bindings.nixlNotFoundError, ProtocolError),
    ],
)
@pytest.mark.parametrize("call", ["add_remote_agent", "prep_xfer_dlist"])
def test_only_what_does_not_match_is_told_from_a_wire_that_may_work_later(
    monkeypatch: pytest.MonkeyPatch, call: str, kind: type[Exception], expected: type[RltError]
) -> None:
    def fail(*_: object) -> None:
        raise kind("as told")

    with closing(transport("p")) as writer, closing(transport("d")) as reader:
        mine = writer.agent_metadata()
        theirs = reader.add_source("p", mine)
        with monkeypatch.context() as broken:
            broken.setattr(nixl_agent, call, fail)
            with pytest.raises(expected, match="as told"):
                writer.add_target("d", theirs, reader.pool)
            if call == "add_remote_agent":
                with pytest.raises(expected, match="as told"):
                    reader.add_source("q", mine)
        writer.add_target("d", theirs, reader.pool)


def test_a_worker_that_can_have_no_agent_now_may_have_one_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise _bindings.nixlBackendError("no memory to lock")

    with closing(transport("p")) as writer, closing(transport("d")) as reader:
        metadata = writer.agent_metadata()
        with monkeypatch.context() as broken:
            broken.setattr(nixl_agent, "register_memory", fail)
            with pytest.raises(TransportError, match="no memory to lock"):
                reader.add_source("p", metadata)
        reader.add_source("p", metadata)


def test_an_idle_transport_uses_no_cpu() -> None:
    with closing(transport("p")) as writer, closing(transport("d")) as reader:
        metadata = reader.add_source("p", writer.agent_metadata())
        writer.add_target("d", metadata, reader.pool)
        used_s = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - used_s < 0.1


def test_nothing_is_printed_and_logging_goes_the_usual_way(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with closing(transport("p")) as writer:
        writer.agent_metadata()
        with caplog.at_level(logging.WARNING):
            logging.getLogger("nixl.test").warning("heard")
    printed = capfd.readouterr()
    assert printed.out == "" and "INFO" not in printed.err
    assert "heard" in caplog.text


def test_pools_that_do_not_fit_the_geometry_are_refused() -> None:
    pools = canary_pools(SHAPE, blocks=4, rows=2)
    for bad in (
        Pools(pools.kv[:, :2], pools.hidden, SHAPE),
        Pools(pools.kv, pools.hidden[:, :8], SHAPE),
        Pools(pools.kv, pools.hidden, geometry("bfloat16")),
    ):
        with pytest.raises(ProtocolError, match="pools"):
            describe(bad.kv, bad.hidden, bad.geometry)
