# SPDX-License-Identifier: Apache-2.0
"""Object store: 64 objects of 32 KiB a batch, over HTTP from a server that answers in 100 ms."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fsspec.implementations.http import HTTPFileSystem
from torch.utils.data import Dataset

from workloads.workload import Workload, index_batches

OBJECT_BYTES = 32 << 10
OBJECT_COUNT = 256
EPOCH_SAMPLES = 16_384
SERVER = Path(__file__).resolve().parents[1] / "object_server.py"


class Objects(Dataset[torch.Tensor]):
    """An epoch of `EPOCH_SAMPLES` that cycles through the objects; owns the server."""

    def __init__(self, folder: Path) -> None:
        file, answer_s = folder / "objects.bin", (folder / "answer_s").read_text()
        self._server = subprocess.Popen(
            [sys.executable, str(SERVER), str(file), str(OBJECT_BYTES), answer_s],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        self._url = f"http://127.0.0.1:{int(self._server.stdout.readline())}"
        self._lock = threading.Lock()
        self._store: HTTPFileSystem | None = None
        self._store_pid = 0

    def __len__(self) -> int:
        return EPOCH_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return to_tensor(self.store().cat_file(self.url(index)))

    def url(self, index: int) -> str:
        return f"{self._url}/{index % OBJECT_COUNT}"

    def store(self) -> HTTPFileSystem:
        """Return the store of this process, whose connections all threads share."""
        with self._lock:
            if self._store is None or self._store_pid != os.getpid():
                self._store, self._store_pid = HTTPFileSystem(), os.getpid()
            return self._store


def to_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def prepare(folder: Path, quick: bool) -> None:
    (folder / "objects.bin").write_bytes(random.Random(0).randbytes(OBJECT_COUNT * OBJECT_BYTES))
    (folder / "answer_s").write_text("0.002" if quick else "0.1")


def build(folder: Path) -> dict[str, Any]:
    return {"dataset": Objects(folder), "batch_size": 64, "shuffle": True}


def work(arguments: dict[str, Any], index: int, count: int) -> Iterator[None]:
    dataset: Objects = arguments["dataset"]
    for samples in index_batches(arguments, index, count):
        contents = dataset.store().cat([dataset.url(sample) for sample in samples])
        [to_tensor(content) for content in contents.values()]
        yield


WORKLOAD = Workload(
    "object_store",
    build,
    work,
    work_is="one fsspec cat() of the 64 objects of each batch, 2 processes",
    prepare=prepare,
    floor=12.0,
    penstock_options={"fetch_threads": 64},
    warmup_batches=2,  # 6.5 s each with torch's loader
    timed_batches=4,
)
