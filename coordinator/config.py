"""The coordinator's options. Frozen, checked once at start, and never written back.

Every complaint names the option and says what would work.
"""

import ipaddress
import os
from pathlib import Path

import msgspec

from ..runtime.errors import ConfigError


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds. worker_endpoint and client_endpoints default to sockets in runtime_dir.

    model: checkpoint folder whose tokenizer is used (None: token IDs only).
    expected_prefill, expected_decode: how many workers must have registered, and every pair of them
    be ready (or refused, but not all), before the service calls itself ready; 0: ready at once.
    resumed: it takes the place of one that was ready: then it waits for them only for a while.
    max_attempts: how often a request is tried before another token of it is delivered.
    pair_wait_s: how long a request waits without any ready pair (None: until its deadline).
    http: HOST:PORT of the HTTP front; auto is 127.0.0.1:8000, or any free port where that is taken;
    None: there is none. http_token_file: whoever asks must send the word in it.
    """

    runtime_dir: str
    worker_endpoint: str | None = None
    client_endpoints: tuple[str, ...] = ()
    model: str | None = None
    expected_prefill: int = 0
    expected_decode: int = 0
    resumed: bool = False
    heartbeat_s: float = 0.5
    heartbeat_timeout_s: float = 10.0
    max_queue: int = 1024
    max_bypasses: int = 8
    max_attempts: int = 3
    default_deadline_s: float = 600.0
    pair_wait_s: float | None = None
    drain_s: float = 30.0
    stop_s: float = 10.0
    client_backlog: int = 4096
    http: str | None = "auto"
    http_token_file: str | None = None
    http_max_body_bytes: int = 4 << 20
    log_level: str = "INFO"
    insecure: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.pair_wait_s is not None and self.pair_wait_s < 0:
            raise ConfigError(f"pair_wait_s must not be negative, got {self.pair_wait_s}")
        if self.heartbeat_timeout_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"heartbeat_timeout_s ({self.heartbeat_timeout_s}) must be at least twice "
                f"heartbeat_s ({self.heartbeat_s})"
            )
        if self.log_level not in _LOG_LEVELS:
            raise ConfigError(f"log_level must be one of {', '.join(_LOG_LEVELS)}")
        for endpoint in (self.workers_at, *self.clients_at):
            check_endpoint(endpoint, insecure=self.insecure)
        if self.http not in (None, "auto"):
            check_http_address(self.http, insecure=self.insecure)

    @property
    def workers_at(self) -> str:
        return self.worker_endpoint or f"ipc://{Path(self.runtime_dir).absolute()}/workers.sock"

    @property
    def clients_at(self) -> tuple[str, ...]:
        default = f"ipc://{Path(self.runtime_dir).absolute()}/client.sock"
        return self.client_endpoints or (default,)


_POSITIVE = (
    "heartbeat_s",
    "heartbeat_timeout_s",
    "max_queue",
    "max_attempts",
    "default_deadline_s",
    "http_max_body_bytes",
)
_NOT_NEGATIVE = (
    "expected_prefill",
    "expected_decode",
    "max_bypasses",
    "drain_s",
    "stop_s",
    "client_backlog",
)
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_IPC_PATH_BYTES = 107  # what the kernel takes for a socket's path


def check_endpoint(endpoint: str, *, insecure: bool) -> None:
    """Refuse an address that cannot work, or that would listen to the network unencrypted."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        if len(os.fsencode(rest)) > _IPC_PATH_BYTES:
            raise ConfigError(
                f"socket path {rest} is longer than {_IPC_PATH_BYTES} bytes: "
                "give a shorter runtime_dir"
            )
        return
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port == "*" or port.isdigit()):
        raise ConfigError(f"{endpoint!r} is not an address: use ipc://PATH or tcp://HOST:PORT")
    if not insecure and not _is_loopback(host.strip("[]")):
        raise ConfigError(
            f"{endpoint} would listen beyond this machine without encryption: "
            "listen at 127.0.0.1, or give --insecure if the network is trusted"
        )


def check_http_address(address: str, *, insecure: bool) -> None:
    host, _, port = address.rpartition(":")
    if not host or not (port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"http {address!r} is no address: give HOST:PORT, 127.0.0.1:8000 for one")
    if not insecure and not _is_loopback(host.strip("[]")):
        raise ConfigError(
            f"http {address} would listen beyond this machine without encryption: "
            "listen at 127.0.0.1, or give --insecure if the network is trusted"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
