"""Counts every HTTP answer by its status, also those that no route or handler has made.

Stands before everything else. Labels are statuses alone: a path may be anybody's.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..metrics.exposition import Metrics


class CountAnswers:
    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._count = metrics.watch.answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(message["status"])
            await send(message)

        await self._app(scope, receive, counted)
