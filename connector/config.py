"""WorkerConfig: everything one prefill or decode worker process is started with.

Frozen and checked once; travels to the process as one JSON argument.
"""

from typing import Literal

import msgspec

from ..runtime.config import EngineConfig
from ..runtime.errors import ConfigError

EXIT_RESTART = 75  # a worker's exit code: it ended in order, and is to be started again
INCARNATION = "RLT_INCARNATION"  # environment variable: the name of this start of a worker
MAX_NAME_BYTES = 128  # it becomes part of a ZeroMQ identity, of at most 255


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """worker: name, unique in the service. coordinator: endpoint to dial. listen: endpoint where a
    decode worker waits for prefill workers (ipc://PATH, or tcp://HOST:0 for a port of the system's
    choice). max_inflight_bytes: bound on posted and unfinished WRITEs to one decode worker.
    transfer_timeout_s: deadline of one WRITE. reconnect_s: how long a worker whose coordinator is
    gone keeps dialling. max_quarantined: share of a decode worker's blocks, or of its receive
    slots, above which, after 5 s of it, it takes no more requests and asks to be started again.
    """

    role: Literal["prefill", "decode"]
    worker: str
    coordinator: str
    listen: str
    engine: EngineConfig
    max_inflight_bytes: int = 32 << 20
    transfer_timeout_s: float = 30.0
    max_quarantined: float = 0.5
    reconnect_s: float = 30.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not 0 < len(self.worker.encode()) <= MAX_NAME_BYTES or not self.worker.isprintable():
            raise ConfigError(f"--name must have 1 to {MAX_NAME_BYTES} bytes, all printable")
        if "/" in self.worker:
            raise ConfigError(f"--name {self.worker}: a name with / cannot name a socket")
        if self.max_inflight_bytes <= 0:
            raise ConfigError("--max-inflight-bytes must be positive")
        if not 0.0 <= self.max_quarantined <= 1.0:
            raise ConfigError("--max-quarantined must be from 0 to 1")
        if self.transfer_timeout_s <= 0:
            raise ConfigError("--transfer-timeout-s must be positive")
