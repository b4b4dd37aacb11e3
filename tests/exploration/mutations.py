"""Rules taken out of the product's classes, one at a time: what the exploration must find.

Each is a patch of one method, in force while a test runs; the product's files are not touched.
"""

from collections.abc import Callable

import msgspec
import pytest

from rlt.connector.messages import Ack, WriterEnded
from rlt.connector.receive_record import Phase as Receiving
from rlt.connector.receive_record import ReceiveRecord
from rlt.connector.receiver import Receiver
from rlt.connector.sender import Phase, Sender, SendRecord
from rlt.runtime.interfaces import ReceiveComplete


class Mutation(msgspec.Struct, frozen=True, kw_only=True):
    """rule: what is taken out. bounds: where that shows. fault: words of what then goes wrong."""

    rule: str
    bounds: str
    fault: str
    patch: Callable[[pytest.MonkeyPatch], None]


def _received_on_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReceiveRecord, "complete", lambda record: record.commit is not None)
    patch.setattr(Receiver, "_receive", _receive_without_times)


def _receive_without_times(receiver: Receiver, record: ReceiveRecord, commit: object) -> None:
    receiver._messages.append((record.peer, Ack(generation=record.generation)))
    receiver._close(record, Receiving.RECEIVED)
    receiver._let_go(record, ReceiveComplete(record.generation))


def _freed_at_cancel(patch: pytest.MonkeyPatch) -> None:
    def cancel(receiver: Receiver, generation: int, *, writer_never_started: bool) -> None:
        record = receiver._records.get(generation)  # type: ignore[call-overload]
        if record is not None:
            receiver._end(record)

    patch.setattr(Receiver, "cancel", cancel)


def _fence_without_kill(patch: pytest.MonkeyPatch) -> None:
    def writer_done(record: ReceiveRecord) -> bool:
        return record.agent_destroyed or _proved(record)

    patch.setattr(ReceiveRecord, "writer_done", writer_done)


def _proved(record: ReceiveRecord) -> bool:
    if record.writer_posted is not None:
        return record.all_arrived(record.writer_posted)
    return record.complete()


def _source_freed_early(patch: pytest.MonkeyPatch) -> None:
    def advance(sender: Sender, record: SendRecord) -> None:
        if record.phase is Phase.STOPPING:
            ended = WriterEnded(generation=record.generation, posted=len(record.posted))
            sender._messages.append((record.peer, ended))
        if record.phase in (Phase.ACKED, Phase.STOPPING):
            sender._end(record)

    patch.setattr(Sender, "_advance", advance)


def _unheard_posts_forgotten(patch: pytest.MonkeyPatch) -> None:
    def take_orders(sender: Sender) -> list[object]:
        orders, sender._orders = sender._orders, []
        return list(orders)

    patch.setattr(Sender, "take_orders", take_orders)


def _closed_accepted_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sender, "is_over", lambda sender, peer, generation: False)


MUTATIONS = {
    "received_on_commit": Mutation(
        rule="a request is received only when every sequence of its commit was notified",
        bounds="plain",
        fault="was activated with",
        patch=_received_on_commit,
    ),
    "freed_at_cancel": Mutation(
        rule="blocks of a cancelled receive wait until the writer is known to have ended",
        bounds="cancel",
        fault="lands in",
        patch=_freed_at_cancel,
    ),
    "fence_without_kill": Mutation(
        rule="a quarantine ends only when the writer's process was reaped as well",
        bounds="silent p",
        fault="lands in",
        patch=_fence_without_kill,
    ),
    "source_freed_early": Mutation(
        rule="P's blocks are given back only when every posted handle has ended",
        bounds="cancel",
        fault="was given away",
        patch=_source_freed_early,
    ),
    "unheard_posts_forgotten": Mutation(
        rule="what was handed to the worker side counts as posted, whether or not that was heard",
        bounds="cancel",
        fault="lands in|given away",
        patch=_unheard_posts_forgotten,
    ),
    "closed_accepted_again": Mutation(
        rule="a Prefill of a generation that has ended is refused",
        bounds="double",
        fault="",
        patch=_closed_accepted_again,
    ),
}
