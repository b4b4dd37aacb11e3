"""What the coordinator has promised away of each worker, by generation.

Owns the estimates that routing works with. D's reservation decides, these only estimate. Each
credit is taken once and given back once; an idle service has none outstanding.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from ..runtime.errors import InvariantBroken
from ..runtime.interfaces import AdmissionLimits
from ..runtime.types import Generation


class Credit(msgspec.Struct, frozen=True):
    """blocks: until the worker lets go. receive_slots: until D activates. compute_tokens: prompt
    tokens that P has not computed yet."""

    blocks: int = 0
    slots: int = 0
    receive_slots: int = 0
    compute_tokens: int = 0


@dataclass(eq=False)
class Account:
    limits: AdmissionLimits
    quarantined_blocks: int = 0
    given: dict[Generation, Credit] = field(default_factory=dict)
    blocks: int = 0
    slots: int = 0
    receive_slots: int = 0
    compute_tokens: int = 0
    served: int = 0  # attempts ever routed here, and as many as the least busy had when it came

    def has_room(self, credit: Credit) -> bool:
        return (
            self.blocks + credit.blocks + self.quarantined_blocks <= self.limits.num_blocks
            and self.slots + credit.slots <= self.limits.num_slots
            and self.receive_slots + credit.receive_slots <= self.limits.num_receive_slots
        )

    def could_take_now(self, credit: Credit) -> bool:
        """If it were idle, beside what is quarantined."""
        return credit.blocks + self.quarantined_blocks <= self.limits.num_blocks

    def could_ever_take(self, credit: Credit, positions: int) -> bool:
        return (
            credit.blocks <= self.limits.num_blocks
            and credit.slots <= self.limits.num_slots
            and credit.receive_slots <= self.limits.num_receive_slots
            and positions <= self.limits.max_positions
        )

    def add(self, credit: Credit, sign: int) -> None:
        self.blocks += sign * credit.blocks
        self.slots += sign * credit.slots
        self.receive_slots += sign * credit.receive_slots
        self.compute_tokens += sign * credit.compute_tokens


class Books:
    """One account per worker incarnation."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self.changes = 0  # moves whenever room appears

    def open(self, worker: str, limits: AdmissionLimits, *, beside: Iterable[str] = ()) -> None:
        """beside: whoever has its role. One that comes late takes its share from now on, and does
        not catch up."""
        if worker not in self._accounts:
            others = [self._accounts[other] for other in beside if other in self._accounts]
            served = min((other.served for other in others), default=0)
            self._accounts[worker] = Account(limits, served=served)
        self.changes += 1

    def close(self, worker: str) -> None:
        """The worker is gone, and what it had been given with it."""
        self._accounts.pop(worker, None)

    def account(self, worker: str) -> Account:
        return self._accounts[worker]

    def take(self, worker: str, generation: Generation, credit: Credit) -> None:
        account = self._accounts[worker]
        if generation in account.given:
            raise InvariantBroken(f"generation {generation} already has a credit at {worker}")
        account.given[generation] = credit
        account.add(credit, 1)
        account.served += 1

    def shrink(self, worker: str, generation: Generation, keep: Credit) -> None:
        """Give a part back: `keep` is what remains taken. Without effect if all is back already."""
        account = self._accounts.get(worker)
        if account is None or generation not in account.given:
            return
        account.add(account.given[generation], -1)
        account.add(keep, 1)
        account.given[generation] = keep
        self.changes += 1

    def give_back(self, worker: str, generation: Generation) -> None:
        account = self._accounts.get(worker)
        credit = account.given.pop(generation, None) if account is not None else None
        if account is not None and credit is not None:
            account.add(credit, -1)
            self.changes += 1

    def credit(self, worker: str, generation: Generation) -> Credit:
        account = self._accounts.get(worker)
        return account.given.get(generation, Credit()) if account is not None else Credit()

    def set_quarantined(self, worker: str, blocks: int) -> None:
        self._accounts[worker].quarantined_blocks = blocks
        self.changes += 1

    def outstanding(self) -> int:
        """Credits not given back; 0 when idle."""
        return sum(len(account.given) for account in self._accounts.values())

    def statistics(self, worker: str) -> dict[str, float]:
        account = self._accounts[worker]
        return {
            "credit_requests": len(account.given),
            "credit_blocks": account.blocks,
            "credit_slots": account.slots,
            "credit_receive_slots": account.receive_slots,
            "credit_compute_tokens": account.compute_tokens,
        }

    def check(self) -> None:
        for worker, account in self._accounts.items():
            total = Account(account.limits)
            for credit in account.given.values():
                total.add(credit, 1)
            if (total.blocks, total.slots, total.receive_slots, total.compute_tokens) != (
                account.blocks,
                account.slots,
                account.receive_slots,
                account.compute_tokens,
            ):
                raise InvariantBroken(f"credits of {worker} do not add up")
