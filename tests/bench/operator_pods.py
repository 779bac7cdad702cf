"""Every serving pod's admin port at once, for pods that do not run: they all have this process's address."""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web

# As many lines as a real server's page has; of these the operator reads the first ones.
_FIGURES = """draftline_requests_waiting 0
draftline_requests_running 3
draftline_draft_tokens_total 1000
draftline_accepted_tokens_total 700
draftline_speculation_active 1
draftline_draining 0
"""
_PAGE = _FIGURES + "".join(f'draftline_seconds_bucket{{le="{number}"}} {number}\n' for number in range(200))


async def _metrics(_: web.Request) -> web.Response:
    return web.Response(text=_PAGE)


async def serve(host: str, port: int) -> None:
    application = web.Application()
    application.add_routes([web.get("/metrics", _metrics)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
