# SPDX-License-Identifier: Apache-2.0
"""Datasets that pool tests send to workers, and the digests by which streams of them are
compared."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

CODE = str(Path(__file__).parent)  # the folder of this module


class Augmented(Dataset[dict[str, Any]]):
    """Samples that draw from all three global generators and take ``seconds`` each."""

    def __init__(self, count: int, values: int = 64, seconds: float = 0) -> None:
        self.count = count
        self.values = values
        self.seconds = seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        noise = torch.rand(self.values) + random.random() + float(np.random.rand())
        return {"index": index, "x": noise + index, "name": f"sample {index}"}


class Corrupt(Dataset[Any]):
    """Samples that draw from all three global generators, and then raise for some indices."""

    def __init__(self, count: int, bad: Iterable[int]) -> None:
        self.count = count
        self.bad = frozenset(bad)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        self.check(index)
        return index, torch.tensor(drawn, dtype=torch.float64)

    def check(self, index: int) -> None:
        if index in self.bad:
            raise LookupError(f"no sample {index}")


class CorruptBatches(Corrupt):
    """Indices, read by the batch."""

    def __getitem__(self, index: int) -> Any:
        self.check(index)
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images as bytes, with their classes."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8), index % 10


class Logarithms(Dataset[torch.Tensor]):
    """Numbers whose last bits depend on the kernels that compute them."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        numbers = torch.arange(1000, dtype=torch.float32) + index
        return torch.softmax(torch.log1p(numbers), 0)


class Shards(IterableDataset[tuple[int, torch.Tensor]]):
    """Numbers below ``count``, divided among the shards."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(start, self.count, step):
            yield number, torch.rand(8) + number


class ShardIterator:
    """Continues from its state."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers
        self._place = 0

    def __iter__(self) -> ShardIterator:
        return self

    def __next__(self) -> torch.Tensor:
        if self._place == len(self._numbers):
            raise StopIteration
        self._place += 1
        return torch.rand(4) + self._numbers[self._place - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = state["place"]


class StatefulShards(IterableDataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> ShardIterator:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return ShardIterator(list(range(start, self.count, step)))


def digest(value: Any) -> str:
    """Return the SHA-256 of a batch: of every tensor's bytes, dtype and shape, and of the structure
    around them."""
    found = hashlib.sha256()
    _add(found, value)
    return found.hexdigest()


def digests(batches: Iterable[Any]) -> list[str]:
    return [digest(batch) for batch in batches]


def _add(found: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)}".encode())
        found.update(
            value.contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b""
        )
    elif isinstance(value, np.ndarray):
        found.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, dict):
        found.update(f"dict {len(value)}".encode())
        for key, part in value.items():
            _add(found, key)
            _add(found, part)
    elif isinstance(value, (list, tuple)):
        found.update(f"{type(value).__name__} {len(value)}".encode())
        for part in value:
            _add(found, part)
    else:
        found.update(repr(value).encode())


class Pictures(Dataset[dict[str, Any]]):
    """Images as bytes that are large enough for lazy fetching, each with a mask and a class."""

    def __init__(self, count: int, edge: int = 64) -> None:
        self.count = count
        self.edge = edge

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        size = (self.edge, self.edge)
        return {
            "image": torch.randint(0, 256, (3, *size), dtype=torch.uint8),
            "mask": torch.randint(0, 2, size),
            "class": index % 10,
        }


class PictureShards(IterableDataset[dict[str, Any]]):
    """Pictures in shards."""

    def __init__(self, count: int) -> None:
        self.pictures = Pictures(count)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(start, len(self.pictures), step):
            yield self.pictures[index]


class FloatPictures(Pictures):
    """Images of floats, which can have gradients."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {**sample, "image": sample["image"].float()}


class ForgetfulPictures(Pictures):
    """Returns different values whenever a sample is made."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        sample["image"] = torch.frombuffer(
            bytearray(os.urandom(sample["image"].numel())), dtype=torch.uint8
        ).view_as(sample["image"])
        return sample


class Tokens(Dataset[dict[str, Any]]):
    """Tensors of which some are compressed on a slow connection and others are not."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = int(torch.randint(1, 64, ()))
        weights = torch.zeros(256)
        weights[:length] = torch.rand(length)
        return {
            "ids": torch.randint(-3, 200, (256,)),
            "attended": torch.rand(512) < 0.5,
            "weights": weights,
            "user": torch.full((128,), float(index % 4)).cumsum(0),
            "hashes": torch.randint(-(1 << 62), 1 << 62, (64,)),
            "noise": torch.rand(64),
        }


class Recorded(Dataset[Any]):
    """Samples that are counted in a file, over all processes. ``draws``: from which generator they
    draw: "", "torch", "numpy", "random", or "seed" if they read a seed without drawing."""

    def __init__(
        self, path: Path, count: int, draws: str = "", values: int = 256, seconds: float = 0
    ) -> None:
        self.path = str(path)
        self.count = count
        self.draws = draws
        self.values = values
        self.seconds = seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, b".")
        os.close(descriptor)
        time.sleep(self.seconds)
        drawn = {
            "": lambda: 0.0,
            "torch": lambda: torch.rand(()).item(),
            "numpy": lambda: float(np.random.rand()),
            "random": random.random,
            "seed": lambda: torch.initial_seed() % 1000 / 1000,
        }[self.draws]()
        return index, torch.arange(self.values) * (index + 1) + drawn

    def read_count(self) -> int:
        """Return how many samples were fetched so far."""
        return os.path.getsize(self.path) if os.path.exists(self.path) else 0


class RecordedWithGenerator(Recorded):
    def __getitem__(  # type: ignore[override]
        self, index: int, generator: torch.Generator | None = None
    ) -> tuple[int, torch.Tensor]:
        index, values = super().__getitem__(index)
        return index, values + torch.rand((), generator=generator)
