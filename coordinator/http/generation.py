"""Runs the requests of one HTTP call and sends what comes of them, whole or as a stream.

Owns the call's client for exactly as long as the response lasts: whatever ends the response also
cancels what still runs. An error before the first output has a status code of its own; one that
comes later is the stream's last event, and [DONE] does not follow.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...connector.messages import Deltas, Generate, Rejected
from ...runtime.errors import RltError, error_from
from ...runtime.interfaces import Delta
from ...runtime.types import FinishReason
from ..local_clients import LocalClient
from .answers import Usage
from .asked import Call
from .errors import ApiError, api_error
from .front import Front
from .shapes import Shape

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
Outputs = AsyncIterator[list[tuple[int, Delta]]]
_encode = msgspec.json.Encoder().encode


class Gone(Exception):
    """Whoever asked has closed the connection."""


class Generation(Response):
    """A response that makes itself while it is sent."""

    def __init__(self, front: Front, call: Call, shape: Shape) -> None:
        super().__init__()
        self._front = front
        self._call = call
        self._shape = shape
        self._completion_tokens = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._front.open() as client, contextlib.suppress(Gone):
            async with _closed_with_connection(client, receive):
                outputs = self._outputs(client)
                async with contextlib.aclosing(outputs):
                    if self._call.stream:
                        await self._send_stream(outputs, send)
                    else:
                        answer = await self._whole(outputs)
                        headers = {"x-request-id": self._call.id}
                        response = Response(_encode(answer), 200, headers, "application/json")
                        await response(scope, receive, send)

    async def _outputs(self, client: LocalClient) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """What has come, in order per choice; raises the error that ends any of them."""
        index = {request.request_id: n for n, request in enumerate(self._call.requests)}
        for number, request in enumerate(self._call.requests):
            client.ask(Generate(submission=number + 1, request=request))
        running = len(index)
        while running:
            messages = await client.take()
            if client.closed:
                raise Gone
            batch: list[tuple[int, Delta]] = []
            failure: RltError | None = None
            for message in messages:
                if isinstance(message, Rejected):
                    failure = error_from(message.code, message.error)
                    break
                for delta in message.deltas if isinstance(message, Deltas) else ():
                    if delta.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
                        failure = failure or _failure(delta)
                        continue
                    running -= delta.finish_reason is not None
                    batch.append((index[delta.request_id], delta))
            if batch:
                yield batch
            if failure is not None:
                raise failure

    async def _whole(self, outputs: Outputs) -> msgspec.Struct:
        pieces: list[list[Delta]] = [[] for _ in self._call.requests]
        async for batch in outputs:
            for index, delta in batch:
                self._completion_tokens += len(delta.token_ids)
                pieces[index].append(delta)
        return self._shape.whole([joined(deltas) for deltas in pieces], self._usage())

    async def _send_stream(self, outputs: Outputs, send: Send) -> None:
        first = await anext(outputs)  # an error here has a status code of its own
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            "x-request-id": self._call.id,
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        end = DONE
        try:
            await _send_part(send, b"".join(self._events(first)))
            async for batch in outputs:
                await _send_part(send, b"".join(self._events(batch)))
            if self._call.include_usage:
                end = _event(self._shape.last(self._usage())) + DONE
        except Gone:
            raise
        except RltError as error:
            end = _event(api_error(error).body)
        except Exception:
            logger.exception("a stream failed")
            end = _event(ApiError(500, "internal", "the server failed; its log says more").body)
        await send({"type": "http.response.body", "body": end, "more_body": False})

    def _events(self, batch: list[tuple[int, Delta]]) -> Iterator[bytes]:
        for index, delta in batch:
            self._completion_tokens += len(delta.token_ids)
            chunk = self._shape.chunk(index, delta, self._usage())
            if chunk is not None:
                yield _event(chunk)

    def _usage(self) -> Usage:
        prompt, output = self._call.prompt_tokens, self._completion_tokens
        return Usage(prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output)


@contextlib.asynccontextmanager
async def _closed_with_connection(client: LocalClient, receive: Receive) -> AsyncIterator[None]:
    """Close the client when the HTTP connection closes, whatever is being waited for."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        client.close()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _send_part(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(record: msgspec.Struct) -> bytes:
    return b"data: " + _encode(record) + b"\n\n"


def _failure(delta: Delta) -> RltError:
    return error_from(delta.error_code or "internal", delta.error or "the request was cancelled")


def joined(deltas: list[Delta]) -> Delta:
    """One delta that says what all of a request's deltas say."""
    return msgspec.structs.replace(
        deltas[-1],
        start_index=0,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        exit_depths=tuple(depth for delta in deltas for depth in delta.exit_depths),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        text="".join(delta.text for delta in deltas),
    )
