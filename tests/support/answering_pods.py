"""Every serving pod's admin port at once, for pods that do not run: they all have this process's address.

`python answering_pods.py ADDRESS PORT` until it is ended, inside a cluster's network; `answering_pods` beside
a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator

from aiohttp import web

ACCEPTANCE = 0.7
"""Of the figures below."""
# As many lines as a real server's page has; of these the operator reads the first ones.
_FIGURES = """draftline_requests_waiting 0
draftline_requests_running 3
draftline_draft_tokens_total {drafted}
draftline_accepted_tokens_total {accepted}
draftline_speculation_active 1
draftline_draining 0
"""
_REST = "".join(f'draftline_seconds_bucket{{le="{number}"}} {number}\n' for number in range(200))
_scrapes = itertools.count(1)


async def _metrics(_: web.Request) -> web.Response:
    """Each scrape finds more drafts, and the same share of them accepted."""
    drafted = 1000 * next(_scrapes)
    return web.Response(text=_FIGURES.format(drafted=drafted, accepted=round(ACCEPTANCE * drafted)) + _REST)


@contextlib.asynccontextmanager
async def answering_pods(host: str, port: int) -> AsyncIterator[None]:
    application = web.Application()
    application.add_routes([web.get("/metrics", _metrics)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()


async def _serve(host: str, port: int) -> None:
    async with answering_pods(host, port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
