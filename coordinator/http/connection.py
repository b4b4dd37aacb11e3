"""One HTTP connection: uvicorn's, with a bound on all that its peer may take or keep.

Never closes one whose request runs and whose peer takes what is sent. A head, or what follows a
body, has its bytes; a peer that is waited for has its time; a request that comes while another runs
ends both, because while one waits in line uvicorn does not see that the connection closes.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10  # beyond what came with its first bytes
PATIENCE_S = 60.0


class Connection(HttpToolsProtocol):
    _in_head = False
    _unused_bytes = 0  # since there last was a part of a body, or an end of a head
    _patience: asyncio.TimerHandle | None = None
    _unsent = 0

    # What comes

    def data_received(self, data: bytes) -> None:
        self._unused_bytes += len(data)
        super().data_received(data)
        if self._unused_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("the head of the request is too large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._unused_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which nobody reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._unused_bytes = False, 0
        if self._answering:
            self._cut()
        else:
            super().on_headers_complete()
            self._wait()

    def on_body(self, body: bytes) -> None:
        self._unused_bytes = 0
        if not self.transport.is_closing():
            super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        if self._answering and self.cycle.response_started:
            self._cut()  # these bytes would be taken for a part of the answer
        else:
            super().send_400_response(msg)

    # Whoever is waited for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wait()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        """The peer's time starts anew, if it is the peer that something waits for now."""
        self._stop_waiting()
        if not self._answering or self.flow.write_paused:
            self._unsent = self.transport.get_write_buffer_size()
            self._patience = self.loop.call_later(PATIENCE_S, self._time_is_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _time_is_up(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent:  # it takes what there is, slowly
            self._wait()
        else:
            self._cut()

    def _cut(self) -> None:
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.abort()
