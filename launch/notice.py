"""Tells the coordinator that a local worker process has ended and was reaped.

Owns one ZeroMQ socket, made when it is first needed: processes are started before that.
"""

import zmq

from ..connector.codec import encode
from ..connector.messages import WorkerExited

LINGER_MS = 1000


class ExitNotices:
    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._socket: zmq.Socket[bytes] | None = None

    def worker_exited(self, worker: str, pid: int, status: int) -> None:
        if self._socket is None:
            self._socket = zmq.Context.instance().socket(zmq.DEALER)
            self._socket.set(zmq.LINGER, LINGER_MS)
            self._socket.connect(self._endpoint)
        self._socket.send(encode(WorkerExited(worker=worker, pid=pid, status=status)), zmq.NOBLOCK)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
