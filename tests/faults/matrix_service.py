"""The service of a row of cells, kept for as long as cells ask for it and none has failed.

Owns the service and, where links are to be cut, its network: each worker on a host of its own, with
a network and shared memory of its own, as on two machines.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rlt.coordinator.client import Client

from ..system.namespaces import Network, network
from .faults import Faults, faulty
from .matrix import TRANSPORTS, Setting

# One WRITE at a time, so that what is being sent is not yet committed.
WORKER = {"transfer_timeout_s": 3.0, "max_inflight_bytes": 1}
MOST_WAIT_S = 0.25  # before a worker that was killed again and again is started again


class Served:
    def __init__(self, faults: Faults, client: Client, network: Network | None) -> None:
        self.faults, self.client, self.network = faults, client, network


class Services:
    """One at a time."""

    def __init__(self) -> None:
        self._setting: Setting | None = None
        self._served: Served | None = None
        self._stack = ExitStack()

    @contextmanager
    def of(self, setting: Setting) -> Iterator[Served]:
        """Whoever leaves it with an error leaves no service behind."""
        if self._setting != setting:
            self.close()
            self._setting, self._served = setting, self._stack.enter_context(_served(setting))
        assert self._served is not None
        try:
            yield self._served
        except BaseException as error:
            self._setting = None
            if not self._stack.__exit__(type(error), error, error.__traceback__):
                raise

    def close(self) -> None:
        self._setting = self._served = None
        self._stack.close()


@contextmanager
def _served(setting: Setting) -> Iterator[Served]:
    prefill, decode = setting.team
    with ExitStack() as stack:
        hosts, listen_at, net = {}, {}, None
        if setting.fault == "link cut":
            cables = [
                (f"prefill-{p}", f"decode-{d}") for p in range(prefill) for d in range(decode)
            ]
            net = stack.enter_context(network(*cables))
            hosts = {
                name: tuple(host.command(["unshare", "--ipc"])) for name, host in net.hosts.items()
            }
            listen_at = {d: f"tcp://{net.hosts[d].addresses[p]}:0" for p, d in cables}
        faults = stack.enter_context(
            faulty(
                prefill,
                decode,
                seed=0,
                transport=TRANSPORTS[setting.transport],
                worker=WORKER,
                most_s=MOST_WAIT_S,
                hosts=hosts,
                listen_at=listen_at,
            )
        )
        yield Served(faults, stack.enter_context(faults.client()), net)
