# SPDX-License-Identifier: Apache-2.0
"""The part of a sample cache that is in memory, shared by the processes of this machine.

A memfd, so it is freed with the last process that has it and has no name that could be left behind.
Forked processes inherit it, spawned ones receive its descriptor. Its counters and marks are used
without memory for samples, too.
"""

from __future__ import annotations

import os
from multiprocessing import context, reduction
from typing import Any

from penstock import _C

MISSING: Any = object()  # a sample may be None
Count = _C.StoreCount


class MemoryStore:
    """Samples by index, in memory that processes share. Thread-safe."""

    def __init__(self, sample_count: int, budget_bytes: int) -> None:
        self._set(_C.SampleStore.create(sample_count=sample_count, budget_bytes=budget_bytes))

    def _set(self, native: _C.SampleStore) -> None:
        self._native = native
        self.is_barred = native.is_barred
        self.count, self.counted = native.count, native.counted
        self.get = native.get

    @property
    def native(self) -> _C.SampleStore:
        return self._native

    def __reduce__(self) -> Any:
        if context.get_spawning_popen() is None:
            raise TypeError("the memory of a cache cannot be sent to another machine or to a file")
        return _attach, (reduction.DupFd(self._native.fd),)


def _attach(descriptor: Any) -> MemoryStore:
    store: MemoryStore = MemoryStore.__new__(MemoryStore)
    fd = descriptor.detach()
    os.set_inheritable(fd, False)
    store._set(_C.SampleStore.attach(fd))
    return store
