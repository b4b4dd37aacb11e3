"""Hosts and cables for tests: network namespaces joined by links that can be cut and mended.

Owns the namespaces, their interfaces and whatever still runs in them at the end. Knows nothing of
rlt. A cut link drops every packet in silence, as a pulled cable behind a switch does: no error, no
reset, carrier up at both ends. Needs root; names are random, so tests may run side by side.
"""

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
MS_REC, MS_SLAVE, MNT_DETACH = 1 << 14, 1 << 19, 2


class Refused(Exception):
    """This machine does not let us make namespaces; says why."""


@dataclass(frozen=True)
class Host:
    """One namespace. addresses: of this host, by the other end of the link."""

    namespace: str
    addresses: dict[str, str]

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs `arguments` on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def enter(self) -> None:
        """What `ip netns exec` does, for a process that was just forked. UCX looks for its devices
        in /sys, which shows those of the namespace that mounted it."""
        libc = ctypes.CDLL(None, use_errno=True)

        def must(name: str, *arguments: int | bytes | None) -> None:
            if getattr(libc, name)(*arguments):
                raise OSError(ctypes.get_errno(), f"{name}{arguments}: {self.namespace}")

        with open(f"/run/netns/{self.namespace}", "rb") as file:
            must("setns", file.fileno(), CLONE_NEWNET)
        must("unshare", CLONE_NEWNS)
        must("mount", b"", b"/", None, MS_REC | MS_SLAVE, None)
        must("umount2", b"/sys", MNT_DETACH)
        must("mount", b"sysfs", b"/sys", b"sysfs", 0, None)

    def device(self, other: str) -> str:
        return f"to-{other}"


@dataclass(frozen=True)
class Link:
    """A bridge in the switch's namespace with one port for each end."""

    switch: str
    bridge: str
    ends: tuple[tuple[str, str], tuple[str, str]]  # namespace and device

    def cut(self) -> None:
        ip("-n", self.switch, "link", "set", self.bridge, "down")

    def mend(self) -> None:
        ip("-n", self.switch, "link", "set", self.bridge, "up")

    def slow(self, megabytes_per_s: float) -> None:
        """In both directions."""
        rate = f"{int(megabytes_per_s * 8e6)}bit"
        self._queue(f"tbf rate {rate} burst 64kb latency 50ms")

    def fast(self) -> None:
        self._queue("noqueue")

    def _queue(self, discipline: str) -> None:
        for namespace, device in self.ends:
            command = f"qdisc replace dev {device} root {discipline}"
            _run(["tc", "-n", namespace, *command.split()])


@dataclass(frozen=True)
class Network:
    hosts: dict[str, Host]
    links: dict[frozenset[str], Link]

    def link(self, one: str, other: str) -> Link:
        return self.links[frozenset((one, other))]


@contextmanager
def network(*cables: tuple[str, str]) -> Iterator[Network]:
    """Hosts with the names in `cables`, each pair joined by a link and a subnet of its own."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise Refused("network namespaces need root and the ip command")
    names = list(dict.fromkeys(name for cable in cables for name in cable))
    run = f"rlt-{secrets.token_hex(4)}"
    switch = f"{run}-switch"
    made: list[str] = []
    try:
        for namespace in (switch, *(f"{run}-{name}" for name in names)):
            _first(["ip", "netns", "add", namespace])
            made.append(namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        hosts = {name: Host(f"{run}-{name}", {}) for name in names}
        links = {
            frozenset(cable): _connect(switch, hosts, cable, number)
            for number, cable in enumerate(cables)
        }
        yield Network(hosts, links)
    finally:
        for namespace in reversed(made):
            _remove(namespace)


def _connect(switch: str, hosts: dict[str, Host], cable: tuple[str, str], number: int) -> Link:
    bridge = f"cable{number}"
    _first(["ip", "-n", switch, "link", "add", bridge, "type", "bridge"])
    ends = []
    for position, (name, other) in enumerate((cable, cable[::-1])):
        host, address = hosts[name], f"10.77.{number}.{position + 1}"
        port, device = f"port{number}-{position}", host.device(other)
        veth = f"link add {port} type veth peer name {device} netns {host.namespace}"
        _first(["ip", "-n", switch, *veth.split()])
        ip("-n", switch, "link", "set", port, "master", bridge, "up")
        ip("-n", host.namespace, "address", "add", f"{address}/24", "dev", device)
        ip("-n", host.namespace, "link", "set", device, "up")
        host.addresses[other] = address
        ends.append((host.namespace, device))
    ip("-n", switch, "link", "set", bridge, "up")
    return Link(switch, bridge, (ends[0], ends[1]))


def _remove(namespace: str) -> None:
    """With what still runs in it: only what was started there by us."""
    listed = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False
    )
    for pid in listed.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "delete", namespace)


def ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _first(command: list[str]) -> None:
    """A step that a machine may forbid."""
    try:
        _run(command)
    except RuntimeError as error:
        raise Refused(str(error)) from error


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
