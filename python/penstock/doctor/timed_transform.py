# SPDX-License-Identifier: Apache-2.0
"""Times the transforms of a dataset separately from the rest of it, in every process that runs
them.

Each process sums its seconds in a separate file, so that processes do not wait for each other.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The names in torchvision's datasets, and in many others since.
_NAMES = ("transform", "transforms", "target_transform")
_PREFIX = "transform-"
_INNER_DATASETS = ("dataset", "datasets")  # of Subset, ConcatDataset and similar datasets
_DEPTH_MAX = 4


class TimedTransform:
    """Wraps a transform, and shows its attributes. Thread-safe."""

    def __init__(self, transform: Callable[..., Any], folder: str) -> None:
        self._penstock_transform = transform
        self._penstock_folder = folder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        clock = _clock_of_process(self._penstock_folder)
        if clock.is_inside():  # inside another timed transform
            return self._penstock_transform(*args, **kwargs)
        began_at = clock.begin()
        try:
            return self._penstock_transform(*args, **kwargs)
        finally:
            clock.end(began_at)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_penstock_"):
            raise AttributeError(name)  # of an object under construction
        return getattr(self._penstock_transform, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return TimedTransform, (self._penstock_transform, self._penstock_folder)

    def __repr__(self) -> str:
        return repr(self._penstock_transform)


def time_transforms(dataset: object, folder: str, depth: int = 0) -> int:
    """Replace the transforms of a dataset, and of its inner datasets, by timed ones. Returns their
    number."""
    attributes = getattr(dataset, "__dict__", None)
    if not isinstance(attributes, dict) or depth > _DEPTH_MAX:
        return 0
    count = 0
    for name in _NAMES:
        transform = attributes.get(name)
        if callable(transform) and not isinstance(transform, TimedTransform):
            attributes[name] = TimedTransform(transform, folder)
            count += 1
    for name in _INNER_DATASETS:
        inner = attributes.get(name)
        for one in inner if isinstance(inner, (list, tuple)) else [inner]:
            if one is not None:
                count += time_transforms(one, folder, depth + 1)
    return count


def transform_seconds(folder: str) -> float:
    """Return the sum over all processes so far."""
    total = 0.0
    for path in Path(folder).glob(f"{_PREFIX}*"):
        content = path.read_bytes()
        if len(content) == 8:
            total += struct.unpack("d", content)[0]
    return total


class _ProcessClock:
    def __init__(self, folder: str) -> None:
        self.pid = os.getpid()
        descriptor = os.open(
            f"{folder}/{_PREFIX}{self.pid}-{time.monotonic_ns()}", os.O_RDWR | os.O_CREAT, 0o600
        )
        try:
            os.ftruncate(descriptor, 8)
            self._sum = mmap.mmap(descriptor, 8)
        finally:
            os.close(descriptor)
        self._lock = threading.Lock()
        self._thread = threading.local()

    def is_inside(self) -> bool:
        return getattr(self._thread, "is_inside", False)

    def begin(self) -> float:
        self._thread.is_inside = True
        return time.perf_counter()

    def end(self, began_at: float) -> None:
        took_s = time.perf_counter() - began_at
        self._thread.is_inside = False
        with self._lock:
            struct.pack_into("d", self._sum, 0, struct.unpack_from("d", self._sum)[0] + took_s)


_clocks: dict[str, _ProcessClock] = {}


def _clock_of_process(folder: str) -> _ProcessClock:
    clock = _clocks.get(folder)
    if clock is None or clock.pid != os.getpid():  # a forked process has its parent's
        clock = _clocks[folder] = _ProcessClock(folder)
    return clock
