"""Which ready pair takes a request: the least loaded one that has room, else the one used least.

Pure: everything it looks at is handed in. "Not now" (Wait), "nobody is there" (NoPair) and "never"
(Refuse) are different answers.
"""

from collections.abc import Iterable, Mapping

import msgspec

from ..runtime.events import Refuse, Wait
from ..runtime.types import EngineRequest, KVGeometry
from .credits import Account, Books, Credit


class Pair(msgspec.Struct, frozen=True, order=True):
    """Incarnations of a prefill and a decode worker that can transfer."""

    prefill: str
    decode: str


class Need(msgspec.Struct, frozen=True):
    """What one attempt takes of each side. decode_first: of a worker where it grows, at first.
    context_tokens: what P runs, the prompt and what is replayed."""

    prefill: Credit
    decode: Credit
    decode_first: Credit
    context_tokens: int
    capacity_tokens: int

    def of_decode(self, account: Account) -> Credit:
        return self.decode_first if account.limits.grows else self.decode


class NoPair(msgspec.Struct, frozen=True):
    """Nobody could take it now, however idle. code: which kind of worker is missing."""

    code: str
    reason: str


Choice = Pair | Wait | NoPair | Refuse


def need_of(request: EngineRequest, geometry: KVGeometry) -> Need:
    context, whole = request.context_tokens, request.capacity_tokens
    first = min(context + 1, whole)
    return Need(
        prefill=Credit(blocks=geometry.blocks(context), slots=1, compute_tokens=context),
        decode=Credit(blocks=geometry.blocks(whole), receive_slots=1),
        decode_first=Credit(blocks=geometry.blocks(first), receive_slots=1),
        context_tokens=context,
        capacity_tokens=whole,
    )


def choose_pair(
    need: Need,
    pairs: Iterable[Pair],
    prefill: Iterable[str],
    decode: Iterable[str],
    books: Books,
    refused_by: Mapping[str, tuple[str, str]],
    failed_at: Mapping[str, int],
) -> Choice:
    """pairs: those that may be given something. prefill, decode: every registered worker.
    failed_at: by worker, how often it failed this request; others are preferred."""
    prefill, decode = tuple(prefill), tuple(decode)
    never = _never(need, prefill, decode, books, refused_by)
    if never is not None:
        return never
    usable = [p for p in pairs if p.prefill not in refused_by and p.decode not in refused_by]
    if not usable:
        return _nobody(prefill, decode)
    able = [pair for pair in usable if books.account(pair.decode).could_take_now(need.decode)]
    if not able:
        reason = f"too much is quarantined at every decode worker for {need.decode.blocks} blocks"
        return NoPair("no_decode_worker", reason)
    fitting = [
        pair
        for pair in able
        if books.account(pair.prefill).has_room(need.prefill)
        and (account := books.account(pair.decode)).has_room(need.of_decode(account))
    ]
    if not fitting:
        return Wait(f"no pair has room for {need.decode.blocks} blocks and a receive slot")

    def rank(pair: Pair) -> tuple[int, float, int, Pair]:
        failures = failed_at.get(pair.prefill, 0) + failed_at.get(pair.decode, 0)
        return (failures, *_load(pair, books), pair)

    return min(fitting, key=rank)


def _load(pair: Pair, books: Books) -> tuple[float, int]:
    prefill, decode = books.account(pair.prefill), books.account(pair.decode)
    load = (
        prefill.compute_tokens / max(1, prefill.limits.max_positions)
        + prefill.blocks / max(1, prefill.limits.num_blocks)
        + decode.blocks / max(1, decode.limits.num_blocks)
        + decode.receive_slots / max(1, decode.limits.num_receive_slots)
    )
    return load, prefill.served + decode.served


def _never(
    need: Need,
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    books: Books,
    refused_by: Mapping[str, tuple[str, str]],
) -> Refuse | None:
    for workers, credit, positions in (
        (prefill, need.prefill, need.context_tokens),
        (decode, need.decode, need.capacity_tokens),
    ):
        accounts = [books.account(worker) for worker in workers]
        if accounts and not any(a.could_ever_take(credit, positions) for a in accounts):
            return Refuse("too_long", _too_long(credit, positions, accounts))
        if workers and all(worker in refused_by for worker in workers):
            return Refuse(*refused_by[workers[-1]])
    return None


def _too_long(credit: Credit, positions: int, accounts: list[Account]) -> str:
    blocks = max(account.limits.num_blocks for account in accounts)
    longest = max(account.limits.max_positions for account in accounts)
    return (
        f"needs {credit.blocks} blocks for {positions} positions, but the largest pool has "
        f"{blocks} blocks and takes {longest} positions: shorten the prompt or max_tokens, "
        "or give the workers a larger pool"
    )


def _nobody(prefill: tuple[str, ...], decode: tuple[str, ...]) -> NoPair:
    if not prefill:
        return NoPair("no_prefill_worker", "no prefill worker is registered")
    if not decode:
        return NoPair("no_decode_worker", "no decode worker is registered")
    return NoPair("no_decode_worker", "no prefill worker is connected to a decode worker")
