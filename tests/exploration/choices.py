"""What may happen next in a moment: by itself, because something goes wrong, or in good order.

Pure: looks at the moment and changes nothing.
"""

from collections.abc import Iterator

from .bounds import FAULTS
from .moment import FLYING, GIVEN_UP, LANDED, ORPHANED, Event, Moment

BUDGET_OF_DELAYS, BUDGET_TOGETHER, BUDGET_OF_ROUNDS = -3, -2, -1


def events(moment: Moment) -> Iterator[Event]:
    """Everything that may happen within the bounds."""
    ordinary = list(_ordinary(moment))
    if moment.bounds.delays is None:
        yield from ordinary
    elif ordinary:
        yield from _in_fixed_order(moment, ordinary)
    if not ordinary and moment.budget[BUDGET_OF_ROUNDS] > 0 and not moment.over():
        yield ("round",)
    yield from _free(moment)
    if moment.budget[BUDGET_TOGETHER] > 0:
        yield from _faults(moment)


def orderly_event(moment: Moment, *, submit: bool) -> Event | None:
    """What happens next if nothing goes wrong any more, everything is delivered in the end, and
    time passes only while nothing else happens. None: nothing does.

    submit False: until the service is ready, and nobody asks for anything.
    """
    for event in _ordinary(moment):
        if event[0] != "submit" or submit:
            return event
    for name in moment.workers():
        status, member = moment.status(name), moment.is_member(name)
        if status != "up" and member:
            return ("silent", name)
        if status == "stopped":
            return ("wake", name)
    if not submit and moment.process("C").state.ready:
        return None
    return None if submit and moment.over() else ("round",)


def _in_fixed_order(moment: Moment, ordinary: list[Event]) -> Iterator[Event]:
    """The first of what was not put off; or that is put off as well."""
    eligible = [event for event in ordinary if event not in moment.put_off] or ordinary
    yield eligible[0]
    if moment.budget[BUDGET_OF_DELAYS] > 0 and len(eligible) > 1:
        yield ("put_off", *eligible[0])


def _ordinary(moment: Moment) -> Iterator[Event]:
    """What happens by itself, sooner or later."""
    for (source, to), messages in sorted(moment.lines.items()):
        if messages and moment.hears(to):
            yield ("deliver", source, to)
    for name in moment.workers():
        match moment.status(name):
            case "up" if moment.look(name).computes:
                yield ("compute", name)
            case "dead":
                yield ("reap", name)
            case "reaped" if (spare := moment.spare(name)) is not None:
                yield ("start", spare)
    for key in sorted(moment.wire):
        yield from _of_write(moment, key)
    if _may_submit(moment):
        yield ("submit",)


def _may_submit(moment: Moment) -> bool:
    client, bounds = moment.process("K"), moment.bounds
    return client.next < len(bounds.requests) and (bounds.at_once or not client.live)


def _of_write(moment: Moment, key: tuple[str, int]) -> Iterator[Event]:
    known, target = moment.wire[key][0], moment.status(moment.write(key).target)
    at_work, there = moment.status(key[0]) == "up", target == "up"
    if known == FLYING and at_work and there:
        yield ("land", *key)
        yield ("done", *key)
    elif known == LANDED and at_work:
        yield ("done", *key)
    elif known == GIVEN_UP and there:
        yield ("land", *key)
    if known in (FLYING, LANDED) and at_work and target not in ("up", "stopped"):
        yield ("break", *key)


def _free(moment: Moment) -> Iterator[Event]:
    """What follows from an earlier fault, or never happens."""
    for key in sorted(moment.wire):
        if moment.wire[key][0] == ORPHANED and moment.status(moment.write(key).target) == "up":
            yield ("land", *key)
            yield ("seep", *key)
    for name in moment.workers():
        status = moment.status(name)
        if status == "stopped":
            yield ("wake", name)
        if status in ("stopped", "dead") and moment.is_member(name):
            yield ("silent", name)


def _faults(moment: Moment) -> Iterator[Event]:
    left = dict(zip(FAULTS, moment.budget, strict=False))
    for (source, to), messages in sorted(moment.lines.items()):
        if messages and moment.hears(to):
            yield from ((kind, source, to) for kind in ("lose", "double") if left[kind])
            if left["swap"] and messages[0] != messages[1 % len(messages)]:
                yield ("swap", source, to)
    client = moment.process("K")
    if left["cancel"]:
        yield from (("cancel", name) for name in client.live.keys() - client.cancelling)
    if left["deadline"] and client.live:
        yield ("deadline",)
    if left["early"]:
        yield ("early", "C")
    for name in moment.bounds.victims or tuple(moment.workers()):
        if moment.status(name) == "up":
            kinds = ("early", "late", "stop", "silent", "kill")
            yield from ((kind, name) for kind in kinds if left[kind])
        elif moment.status(name) == "stopped" and left["kill"]:
            yield ("kill", name)
    if left["fail"]:
        for writer, ticket in sorted(moment.wire):
            if moment.wire[writer, ticket][0] == FLYING and moment.status(writer) == "up":
                yield ("fail", writer, ticket)
