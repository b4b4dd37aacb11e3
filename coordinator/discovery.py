"""How clients of one machine find its running services: a small file in each runtime folder.

A service writes service.json once it serves and removes it when it stops; a file whose process is
gone, or that belongs to another user, is passed over. Standard library and msgspec only.
"""

import os
import tempfile
from pathlib import Path

import msgspec

from ..runtime.errors import ServiceUnreachable

RECORD_NAME = "service.json"


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """endpoint: where clients connect. endpoints: all such places. http: the HTTP front's address,
    empty without one. workers_at: where workers dial in."""

    endpoint: str
    endpoints: tuple[str, ...]
    pid: int
    model: str
    http: str = ""
    workers_at: str = ""


def default_base() -> Path:
    """$XDG_RUNTIME_DIR/rlt, or rlt-<uid> in the temporary folder where there is none."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "rlt" if runtime else Path(tempfile.gettempdir()) / f"rlt-{os.getuid()}"


def write_record(runtime_dir: Path, record: ServiceRecord) -> Path:
    """Appears whole, by a rename: whoever watches the folder never reads half of it."""
    path = runtime_dir / RECORD_NAME
    half = path.with_suffix(".json.new")
    half.write_bytes(msgspec.json.encode(record))
    half.rename(path)
    return path


def find_services(base: Path | None = None) -> list[ServiceRecord]:
    """Every service of this user whose process lives, in the order of their folders' names."""
    found = []
    for path in sorted((base or default_base()).glob(f"*/{RECORD_NAME}")):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            record = msgspec.json.decode(path.read_bytes(), type=ServiceRecord)
        except (OSError, msgspec.MsgspecError):  # it stops at this moment, or is not ours
            continue
        if _lives(record.pid):
            found.append(record)
    return found


def discover(base: Path | None = None) -> str:
    """Where to connect: $RLT_CONNECT, else the one running service."""
    named = os.environ.get("RLT_CONNECT")
    if named:
        return named
    services = find_services(base)
    if not services:
        raise ServiceUnreachable(
            f"no service is running under {base or default_base()}: start one with "
            "rlt-coordinator, or name its address (RLT_CONNECT, --connect)"
        )
    if len(services) > 1:
        listed = "".join(f"\n  {s.endpoint}  ({s.model}, process {s.pid})" for s in services)
        raise ServiceUnreachable(
            f"{len(services)} services are running: name one by RLT_CONNECT or --connect:{listed}"
        )
    return services[0].endpoint


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
