# SPDX-License-Identifier: Apache-2.0
"""An object store over HTTP/1.1 on this machine that answers each request after a set time.

usage: object_server.py FILE OBJECT_BYTES ANSWER_S

GET /N gives the Nth OBJECT_BYTES of FILE. Prints its port when it is ready, and ends when its
standard input is closed, which happens when its starters are gone.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from aiohttp import web


async def serve(objects: bytes, object_bytes: int, answer_s: float) -> None:
    async def answer(request: web.Request) -> web.Response:
        start = int(request.match_info["number"]) * object_bytes
        await asyncio.sleep(answer_s)
        return web.Response(body=objects[start : start + object_bytes])

    app = web.Application()
    app.router.add_get("/{number}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), is_over.set)
    print(runner.addresses[0][1], flush=True)
    await is_over.wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]).read_bytes(), int(sys.argv[2]), float(sys.argv[3])))
