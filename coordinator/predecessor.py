"""What a coordinator that was killed left in its folder, and how the next one takes its place.

Whoever holds the folder's lock is alone in it, so the record there is of a process that is gone.
Addresses of the system's choice are had again, because workers and clients go on dialling them.
"""

import logging
import socket
from pathlib import Path

import msgspec

from .config import CoordinatorConfig
from .discovery import RECORD_NAME, ServiceRecord

logger = logging.getLogger(__name__)


def in_place_of_predecessor(config: CoordinatorConfig, folder: Path) -> CoordinatorConfig:
    """The same, with the predecessor's addresses where the system is to choose. Its record stays
    until it is overwritten: whoever looks for a service sees that its process is gone."""
    path = folder / RECORD_NAME
    try:
        record = msgspec.json.decode(path.read_bytes(), type=ServiceRecord)
    except FileNotFoundError:
        return config
    except msgspec.MsgspecError as error:
        logger.warning("%s cannot be read: %s", path, error)
        return config
    logger.info("taking the place of process %d", record.pid)
    clients = list(config.client_endpoints)
    for index, before in enumerate(record.endpoints[: len(clients)]):
        clients[index] = _had_before(clients[index], before)
    workers, http = config.worker_endpoint, config.http
    if workers is not None and record.workers_at:
        workers = _had_before(workers, record.workers_at)
    if http is not None and record.http:
        before = record.http.removeprefix("http://")
        chosen = http == "auto" or http.endswith(":0")
        http = before if chosen and _is_free(before) else http
    return msgspec.structs.replace(
        config,
        worker_endpoint=workers,
        client_endpoints=tuple(clients),
        http=http,
        resumed=True,
    )


def _had_before(endpoint: str, before: str) -> str:
    chosen = endpoint.startswith("tcp://") and endpoint.endswith((":*", ":0"))
    return before if chosen and _is_free(before.removeprefix("tcp://")) else endpoint


def _is_free(address: str) -> bool:
    """Somebody else may have it by now."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host.strip("[]"), int(port)))
        except (OSError, ValueError) as error:
            logger.warning("%s, the address from before, cannot be had: %s", address, error)
            return False
    return True
