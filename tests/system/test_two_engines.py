"""What is in D's memory after a handoff, and when P's bytes leave: real engines, real NIXL."""

import json
from collections.abc import Callable

import pytest
import torch

from rlt.connector.geometry import kv_entries
from rlt.connector.transport import Finished, Transport, Write
from rlt.runtime.events import Activated, PrefillFinished
from rlt.runtime.types import (
    EngineRequest,
    ExitSettings,
    Generation,
    SamplingParams,
    Stamp,
    TokenRange,
)

from .service import GOLDEN
from .two_engines import CANARY, TwoEngines

BLOCK = 16


def request(number: int, prompt_tokens: int, max_tokens: int = 4) -> EngineRequest:
    prompt = torch.randint(
        3, 512, (prompt_tokens,), generator=torch.Generator().manual_seed(number)
    )
    return EngineRequest(
        generation=Generation(number),
        prompt=tuple(prompt.tolist()),
        sampling=SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True),
        exit=ExitSettings(threshold=0.5, min_loops=1, max_loops=4),
    )


def test_golden_outputs_come_through_two_engines() -> None:
    golden = json.loads((GOLDEN.parent / "golden.json").read_text())
    [case] = [
        c for c in golden["cases"] if (c["name"], c["layout"]) == ("ouro_t0.5_min1", "last_exited")
    ]
    requests = [
        EngineRequest(
            generation=Generation(number + 1),
            prompt=tuple(prompt),
            sampling=SamplingParams(max_tokens=24, seed=0, ignore_eos=True),
            exit=ExitSettings(threshold=0.5, min_loops=1, max_loops=4),
        )
        for number, prompt in enumerate(golden["prompts"])
    ]
    with TwoEngines(num_blocks=512, num_slots=16, num_receive_slots=16) as engines:
        outcomes = engines.run(requests)
    assert [(o.token_ids, o.exit_depths) for o in outcomes] == [
        (o["token_ids"], o["exit_depths"]) for o in case["outputs"]
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("prompt_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("chunk_tokens", [7, 512])
def test_d_holds_exactly_what_p_computed_and_nothing_else_was_touched(
    dtype: str, prompt_tokens: int, chunk_tokens: int
) -> None:
    with TwoEngines(dtype=dtype, chunk_tokens=chunk_tokens) as engines:
        asked = request(1, prompt_tokens)
        reservation = engines.start(asked)
        p_tables: list[tuple[int, ...]] = []
        admitted = engines.sender.on_prefill_admitted

        def spy(generation: Generation, tables: tuple[tuple[int, ...], ...], slot: int) -> None:
            p_tables.extend(tables)
            spy_slot.append(slot)
            admitted(generation, tables, slot)

        spy_slot: list[int] = []
        engines.sender.on_prefill_admitted = spy  # type: ignore[method-assign]
        compared = []

        def compare(_: Generation) -> None:
            p, d = engines.p.storage, engines.d.storage
            untouched = torch.ones_like(d.kv, dtype=torch.bool)
            for depth in range(4):
                for position in range(prompt_tokens):
                    index, offset = divmod(position, BLOCK)
                    source = p.kv[p_tables[depth][index], :, :, offset]
                    target = reservation.tables[depth][index]
                    landed = d.kv[target, :, :, offset]
                    assert torch.equal(source.view(torch.uint8), landed.view(torch.uint8))
                    untouched[target, :, :, offset] = False
            rest = d.kv[untouched].view(torch.uint8)
            assert bool((rest == CANARY).all()), "bytes outside the reservation were written"
            hidden = d.hidden[reservation.hidden_slot]
            assert torch.equal(hidden.view(torch.uint8), p.hidden[spy_slot[0]].view(torch.uint8))
            others = torch.ones(len(d.hidden), dtype=torch.bool)
            others[reservation.hidden_slot] = False
            assert bool((d.hidden[others].view(torch.uint8) == CANARY).all())
            compared.append(True)

        engines.on_received = compare
        engines.settle()
        assert compared == [True]
        geometry = engines.p.storage.geometry
        lacked = (
            prompt_tokens * 4 * geometry.num_layers * 2 * geometry.position_bytes
            + geometry.hidden_bytes
        )
        assert engines.p.connector.statistics()["bytes_sent"] == lacked
        [activated] = [e for e in engines.events if isinstance(e, Activated)]
        assert (activated.prefill_tokens, activated.recurrent_loops) == (0, 0)


def canary_hits(engines: TwoEngines) -> tuple[int, int]:
    """At P and D, after looking at every free block."""
    for side in (engines.p, engines.d):
        side.executor.synchronize()
    return (
        engines.p_core.statistics()["canary_hits"],
        engines.d_core.statistics()["canary_hits"],
    )


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_no_engine_writes_into_free_memory(prefix_cache: bool) -> None:
    with TwoEngines(canary=True, prefix_cache=prefix_cache, num_blocks=400) as engines:
        for first in range(1, 25, 8):
            engines.run([request(number, 7 * number, 12) for number in range(first, first + 8)])
        assert canary_hits(engines) == (0, 0)


def test_a_write_into_memory_that_d_has_freed_raises_the_alarm_there() -> None:
    with TwoEngines(canary=True) as engines:
        reservation = engines.start(request(1, 20))
        engines.settle()
        assert canary_hits(engines) == (0, 0)
        pool, blocks = engines.p.connector.pool, reservation.tables[1]
        entries = kv_entries(pool, TokenRange(0, 20), blocks[:2])
        engines.p.storage.kv[list(blocks[:2])] = 1.0
        engines.p.transport.write(Write("d", entries, entries, b""))
        while not engines.p.transport.poll_finished():
            engines.d.transport.poll_notifications()
        assert canary_hits(engines) == (2, 2), "P's own memory was written by hand, D's by P"


class Held:
    """A transport whose finished WRITEs stay unreported until the gate opens."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._kept: list[Finished] = []
        self.opens: Callable[[], bool] = lambda: True

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    def poll_finished(self) -> list[Finished]:
        self._kept += self._transport.poll_finished()
        if not self.opens():
            return []
        kept, self._kept = self._kept, []
        return kept


def unsent_at_compute_end(stamps: tuple[Stamp, ...]) -> int:
    [unsent] = [stamp.num_bytes for stamp in stamps if stamp.event == "compute_end"]
    assert unsent is not None
    return unsent


def depth_bytes(engines: TwoEngines, prompt_tokens: int) -> int:
    geometry = engines.p.storage.geometry
    return prompt_tokens * geometry.num_layers * 2 * geometry.position_bytes


def test_when_compute_of_a_one_chunk_prompt_ends_at_most_one_depth_is_unsent() -> None:
    with TwoEngines() as engines:
        engines.run([request(1, 400)])  # connects the agents
        [outcome] = engines.run([request(2, 400)])
        assert unsent_at_compute_end(outcome.stamps) <= depth_bytes(engines, 400)


def test_a_transport_held_until_compute_ends_is_seen_to_have_sent_nothing() -> None:
    held: list[Held] = []

    def wrap(transport: Transport) -> Transport:
        held.append(Held(transport))
        return held[0]  # type: ignore[return-value]

    with TwoEngines(wrap) as engines:
        held[0].opens = lambda: any(isinstance(e, PrefillFinished) for e in engines.events)
        [outcome] = engines.run([request(1, 400)])
        assert unsent_at_compute_end(outcome.stamps) == 4 * depth_bytes(engines, 400)
