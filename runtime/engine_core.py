"""One engine: a Scheduler, an Executor, on P and D both halves of a connector, and their order.

Owns nothing but that order; runs on its driver's thread and never blocks.
step(): results in, next passes submitted, transfers heard, new WRITEs posted; so the compute thread
never waits for a transfer.
"""

from .config import SchedulerConfig
from .errors import ProtocolError
from .events import EngineEvent, Refuse, Reservation, Wait
from .intake import PrefillAdmitted
from .interfaces import Clock, Executor, SchedulerConnector, WorkerConnector
from .kv_manager import KVManager
from .plans import FinishedRange
from .replay import replay_fault
from .request import Role
from .scheduler import Scheduler
from .types import EngineRequest, Generation, TokenRange
from .validate import engine_request_fault


class EngineCore:
    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        *,
        clock: Clock,
        scheduler_connector: SchedulerConnector | None = None,
        worker_connector: WorkerConnector | None = None,
    ) -> None:
        if (scheduler_connector is None) != (worker_connector is None):
            raise ProtocolError("an engine has both halves of a connector or none")
        capabilities, limits = executor.capabilities(), executor.admission_limits()
        self._executor = executor
        self._connector = scheduler_connector
        self._transfers = worker_connector
        self._clock = clock
        self._num_planes = capabilities.geometry.num_planes
        self._model = capabilities.model
        self._watch = executor.block_watch()
        self._scheduler = Scheduler(
            config,
            kv=KVManager(
                num_blocks=limits.num_blocks,
                geometry=capabilities.geometry,
                prefix_cache=config.prefix_cache,
                watch=self._watch,
            ),
            slots=executor,
            geometry=capabilities.geometry,
            limits=limits,
            eos_token_ids=capabilities.model.eos_token_ids,
            clock=clock,
        )

    def add_local(self, request: EngineRequest) -> None:
        """Queue a request that is computed and decoded here. Raises TooLong or Overloaded, and
        ProtocolError where it is none that an honest coordinator can have made."""
        self._refuse_nonsense(request)
        self._scheduler.add(request, Role.LOCAL)

    def add_prefill(self, request: EngineRequest) -> None:
        """P: queue a prompt that will be sent; nothing more if it is live. Raises as add_local."""
        if self._connector is None:
            raise ProtocolError("this engine has no connector to send a prompt with")
        self._refuse_nonsense(request)
        if request.generation not in self._scheduler.live():
            self._scheduler.add(request, Role.PREFILL)

    def reserve(self, request: EngineRequest) -> Reservation | Wait | Refuse:
        """D: blocks for prompt and output, and a receive slot. The same answer if asked again."""
        if self._connector is None:
            raise ProtocolError("this engine has no connector to receive a prompt with")
        if (fault := self._fault(request)) is not None:
            return Refuse(ProtocolError.code, fault)
        return self._scheduler.reserve(request)

    def _refuse_nonsense(self, request: EngineRequest) -> None:
        if (fault := self._fault(request)) is not None:
            raise ProtocolError(fault)

    def _fault(self, request: EngineRequest) -> str | None:
        return engine_request_fault(request, self._model) or replay_fault(request, self._model)

    def cancel(self, generation: Generation) -> bool:
        """Nothing more is produced for it; Released follows once. False: not live, nothing done."""
        return self._scheduler.cancel(generation)

    def cancel_all(self) -> None:
        """Whoever asked is gone: as if each were cancelled, and nobody waits for a reservation."""
        self._scheduler.cancel_all()

    def step(self) -> list[EngineEvent]:
        events = self._take_results()
        self._run_next()
        events += self._hear_transfers()
        self._post_finished_ranges()
        self._run_next()  # what a transfer has just made runnable
        return events + self._scheduler.take_events()

    def _take_results(self) -> list[EngineEvent]:
        events = self._scheduler.take_events()
        for output in self._executor.collect():
            events += self._scheduler.update_from_output(output)
        return events

    def _hear_transfers(self) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        if self._connector is None or self._transfers is None:
            return events
        if feedback := self._transfers.poll():
            self._connector.on_feedback(feedback)
        for handoff in self._connector.take_events():
            events += self._scheduler.update_from_output(handoff)
        return events

    def _run_next(self) -> None:
        """A preemption may let others in, and whoever comes in may be the only one who can run:
        look again until nothing moves."""
        moved = True
        while moved:
            for admitted in self._scheduler.admit():
                self._begin_sending(admitted)
            plan = self._scheduler.schedule()
            if plan is not None:
                self._executor.submit(plan)
            moved = self._scheduler.take_made_room() or plan is not None

    def _begin_sending(self, admitted: PrefillAdmitted) -> None:
        """What was cached here is finished already; D may lack it."""
        if self._connector is None:
            return
        generation, cached = admitted.generation, TokenRange(0, admitted.cached_tokens)
        hidden_slot = self._executor.export_hidden(generation)
        self._connector.on_prefill_admitted(generation, admitted.tables, hidden_slot)
        if cached:
            now_s, planes = self._clock.wall_s(), range(self._num_planes)
            self._connector.on_ranges_finished(
                [FinishedRange(generation, plane, cached, False, now_s) for plane in planes]
            )

    def _post_finished_ranges(self) -> None:
        if self._connector is None or self._transfers is None:
            return
        if ranges := self._scheduler.take_ranges_to_send():
            self._connector.on_ranges_finished(ranges)
        if orders := self._connector.take_orders():
            self._transfers.post(orders)

    def idle(self) -> bool:
        return self._scheduler.idle()

    def live(self) -> dict[Generation, str]:
        """Every live generation and its phase."""
        return self._scheduler.live()

    def withdrawn_share(self) -> float:
        """Which share of the blocks, or of the receive slots, is quarantined: the larger one."""
        return self._scheduler.withdrawn_share()

    def statistics(self) -> dict[str, int]:
        numbers = self._scheduler.statistics()
        if self._watch is not None:
            self._watch.sweep()
            numbers["canary_hits"] = self._watch.hits
        return numbers

    def check(self) -> None:
        self._scheduler.check()

    def shutdown(self) -> None:
        """End the compute thread; what is live stays unfinished. Idempotent.

        The connectors are closed by whoever made them.
        """
        self._executor.shutdown()
