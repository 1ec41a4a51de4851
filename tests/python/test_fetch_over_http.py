# SPDX-License-Identifier: Apache-2.0
"""Samples read with fsspec from a slow HTTP server, like an object store."""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fsspec
import pytest
import torch
from torch.utils.data import Dataset

from penstock import DataLoader

ANSWER_S = 0.1
OBJECT_BYTES = 2000
OBJECT_COUNT = 40
MISSING = 37


def content(index: int) -> bytes:
    return hashlib.shake_128(str(index).encode()).digest(OBJECT_BYTES)


class Store(BaseHTTPRequestHandler):
    """Answers each request after ANSWER_S, all connections concurrently."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        time.sleep(ANSWER_S)  # the loader's handling of that is tested
        index = int(self.path.rpartition("/")[2])
        body = b"" if index == MISSING else content(index)
        self.send_response(404 if index == MISSING else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Objects(Dataset[torch.Tensor]):
    """The stored data; the file system is made where it is first used, in the worker."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __len__(self) -> int:
        return OBJECT_COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        stored = fsspec.filesystem("http").cat_file(f"{self.url}/{index}")
        return torch.frombuffer(bytearray(stored), dtype=torch.uint8)


@pytest.fixture
def store_url() -> Iterator[str]:
    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # a whole batch connects concurrently

    server = Server(("127.0.0.1", 0), Store)
    process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    process.start()
    server.socket.close()
    yield f"http://127.0.0.1:{server.server_port}"
    process.terminate()
    process.join()
    process.close()


@pytest.mark.long("spawn")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_objects_arrive_in_order_and_a_missing_one_raises(store_url: str, method: str) -> None:
    loader = DataLoader(
        Objects(store_url),
        batch_size=16,
        num_workers=2,
        fetch_threads=16,
        multiprocessing_context=method,
    )
    iterator = iter(loader)
    for start in (0, 16):
        want = [list(content(index)) for index in range(start, start + 16)]
        assert next(iterator).tolist() == want
    with pytest.raises(FileNotFoundError, match="Caught FileNotFoundError in DataLoader worker"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
