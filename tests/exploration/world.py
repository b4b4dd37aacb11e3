"""The explored world: where it begins, what may happen in each state, and what follows from it.

Owns the tables of numbers. A state is five small numbers, so that millions of them can be kept.
"""

from .bounds import FAULTS, Bounds
from .cells import Cells, Numbers
from .choices import events, orderly_event
from .happening import Faulty, Happening
from .moment import Event, Moment, State, Tables

__all__ = ["Event", "Faulty", "State", "World"]


class World:
    def __init__(self, bounds: Bounds, cells: Cells | None = None) -> None:
        self.bounds = bounds
        self.cells = cells or Cells()
        self._tables = Tables(*(Numbers() for _ in range(5)))
        limits = dict(bounds.faults)
        self._budget = [
            *(limits.get(kind, 0) for kind in FAULTS),
            *(bounds.delays or 0, bounds.together, bounds.rounds),
        ]
        nothing = (0,) * len(self._budget)
        self._bare = (self._tables.budgets(nothing), self._tables.put_off(()))
        self.start = self._set_up()

    def _set_up(self) -> State:
        """Every worker registers and every pair opens, in good order."""
        procs = dict.fromkeys(self.bounds.names, (-1, "none"))
        moment = Moment(self.bounds, self.cells, self._tables, procs, {}, {}, self._budget[:], [])
        begin = Happening(moment)
        for name in ("C", "K", *self.bounds.workers):
            begin.create(name)
        begin.say_children()
        state = moment.close()
        while (event := orderly_event(self.read(state), submit=False)) is not None:
            state = self.after(state, event)
        ready = self.read(state)
        ready.budget = self._budget[:]
        return ready.close()

    def read(self, state: State) -> Moment:
        return Moment.read(self.bounds, self.cells, self._tables, state)

    def after(self, state: State, event: Event) -> State:
        """Raises Faulty."""
        moment = self.read(state)
        Happening(moment).happen(event)
        return moment.close()

    def events(self, state: State) -> list[Event]:
        return list(events(self.read(state)))

    def orderly_event(self, state: State) -> Event | None:
        return orderly_event(self.read(state), submit=True)

    def without_budget(self, state: State) -> State:
        """The same, and nothing more may go wrong."""
        return (*state[:3], *self._bare)

    def unended(self, state: State) -> str:
        held = ", ".join(self.read(state).unended())
        return f"never ends: {held or 'the wire'} still hold something"
