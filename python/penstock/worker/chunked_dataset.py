# SPDX-License-Identifier: Apache-2.0
"""A dataset that keeps the chunks of a file which its next samples are from."""

from __future__ import annotations

import operator
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from torch.utils.data import Dataset

from penstock.program_line import warn
from penstock.sampling.chunk_sampler import checked_chunk_lengths, checked_count
from penstock.tuning.byte_sizes import checked_bytes

Chunk = TypeVar("Chunk")
# Chunks whose other samples another process takes: they are dropped only as the oldest ones.
_DIVIDED_MAX = 2


class ChunkedDataset(Dataset[Any], Generic[Chunk]):
    """Map-style dataset of the samples of chunks, which keeps the chunks in use in memory.

    For :class:`ChunkSampler`: a process reads a chunk for its first sample, and drops it after its
    last one. At most ``chunks_in_memory`` chunks, and two more whose other samples are read by
    another process, are kept; then the one that was not used for the longest time is dropped. With
    ``memory`` the chunks are also limited in bytes; a process that drops a chunk before its last
    sample warns, since it reads the chunk again. Each process keeps its own chunks. They are not
    part of the dataset's value, and are not pickled. Thread-safe; one thread at a time reads
    chunks.

    Args:
        chunk_lengths (Sequence[int]): Number of samples of each chunk, 0 or more.
        read_chunk (Callable): Called with the number of a chunk, from 0; returns its samples.
            Picklable, for workers that are spawned and for pools.
        chunks_in_memory (int): Number of chunks to keep, 1 or more: the sampler's
            ``chunks_in_memory`` if each process is one of its ``readers``, else as many times more
            as there are readers for each process. Default: 16.
        memory (int | str | None): Bytes that chunks may take in each process, such as ``"2GB"``:
            their ``nbytes``, or the sum over a list, tuple or dict. A chunk above it is kept alone.
            Default: None, no limit.
        row (Callable): Called with a chunk and the number of a sample in it, from 0; returns the
            sample. Default: ``chunk[number]``.

    Raises:
        ValueError: If ``chunk_lengths``, ``chunks_in_memory`` or ``memory`` is invalid.

    See Also:
        :class:`ChunkSampler`: the order in which each chunk is read once.

    Example::

        def read_chunk(number):
            with h5py.File("data.h5") as file:
                return file["images"][number * 64 : (number + 1) * 64]

        dataset = penstock.ChunkedDataset(lengths, read_chunk)
    """

    def __init__(
        self,
        chunk_lengths: Sequence[int],
        read_chunk: Callable[[int], Chunk],
        *,
        chunks_in_memory: int = 16,
        memory: int | str | None = None,
        row: Callable[[Any, int], Any] = operator.getitem,
    ) -> None:
        self._ends = np.cumsum(checked_chunk_lengths(chunk_lengths))
        self._read_chunk = read_chunk
        self._row = row
        count = checked_count("chunks_in_memory", chunks_in_memory) + _DIVIDED_MAX
        budget_bytes = None if memory is None else checked_bytes("memory", memory)
        self._limits = _Limits(count, budget_bytes)

    def __len__(self) -> int:
        """Return the number of samples.

        Returns:
            int: Number of samples, over all chunks.
        """
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        """Return a sample, reading its chunk if it is not in memory.

        Args:
            index (int): Number of the sample, counted through all chunks; negative from the end.

        Returns:
            Any: The result of ``row``.

        Raises:
            IndexError: If there is no such sample.
        """
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(
                f"index must be from {-len(self)} to {len(self) - 1}, got {index}; pass the number "
                f"of a sample"
            )
        chunk_number = int(np.searchsorted(self._ends, number, side="right"))
        first = int(self._ends[chunk_number - 1]) if chunk_number > 0 else 0
        length = int(self._ends[chunk_number]) - first
        kept = _kept_chunks(self)
        with kept.lock:
            chunk = kept.take(chunk_number, length, self._read_chunk, self._limits)
        return self._row(chunk, number - first)


class _Limits(NamedTuple):
    chunk_count: int
    bytes: int | None  # None: any


class _Kept(NamedTuple):
    chunk: Any
    left_count: int  # of samples that were not taken yet
    bytes: int


class _KeptChunks:
    """Chunks that this process has in memory, the one used last at the end."""

    def __init__(self) -> None:
        self.process_id = os.getpid()
        self.lock = threading.Lock()
        self._chunks: dict[int, _Kept] = {}
        self._held_bytes = 0  # without a limit in bytes always 0
        self._has_warned = False

    def take(
        self, number: int, length: int, read_chunk: Callable[[int], Any], limits: _Limits
    ) -> Any:
        """Return a chunk, of which one sample is taken."""
        kept = self._pop(number) if number in self._chunks else None
        if kept is None:
            while len(self._chunks) >= limits.chunk_count:
                self._pop(next(iter(self._chunks)))
            chunk = read_chunk(number)
            kept = _Kept(chunk, length, 0 if limits.bytes is None else _bytes_of(chunk))
            self._make_room(number, kept.bytes, limits)
        if kept.left_count > 1:
            self._chunks[number] = kept._replace(left_count=kept.left_count - 1)
            self._held_bytes += kept.bytes
        return kept.chunk

    def _pop(self, number: int) -> _Kept:
        kept = self._chunks.pop(number)
        self._held_bytes -= kept.bytes
        return kept

    def _make_room(self, number: int, chunk_bytes: int, limits: _Limits) -> None:
        if limits.bytes is None:
            return
        if chunk_bytes > limits.bytes:
            self._warn(
                f"chunk {number} has {chunk_bytes:,} bytes, more than memory={limits.bytes:,}, and "
                f"is kept alone while its samples are read; raise memory, or write the file with "
                f"smaller chunks"
            )
        dropped_count = 0
        while self._chunks and self._held_bytes + chunk_bytes > limits.bytes:
            self._pop(next(iter(self._chunks)))
            dropped_count += 1
        if dropped_count > 0:
            self._warn(
                f"memory={limits.bytes:,} bytes hold {len(self._chunks) + 1} chunks of the size of "
                f"chunk {number}, {chunk_bytes:,} bytes, so chunks with samples left are dropped "
                f"and read again; raise memory, or pass chunks_in_memory="
                f"{max(1, limits.bytes // max(1, chunk_bytes))} to the dataset and the sampler"
            )

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(text)


def _bytes_of(chunk: Any) -> int:
    if isinstance(chunk, Mapping):
        return sum(map(_bytes_of, chunk.values()))
    if isinstance(chunk, (list, tuple)):
        return sum(map(_bytes_of, chunk))
    size = len(chunk) if isinstance(chunk, (bytes, bytearray)) else getattr(chunk, "nbytes", None)
    return size if isinstance(size, int) else sys.getsizeof(chunk)


# Outside of the datasets, so that a dataset is the same value whichever chunks it has read.
_kept: weakref.WeakKeyDictionary[Any, _KeptChunks] = weakref.WeakKeyDictionary()


def _kept_chunks(dataset: ChunkedDataset[Any]) -> _KeptChunks:
    kept = _kept.get(dataset)
    if kept is None or kept.process_id != os.getpid():  # a fork: the trainer's chunks are dropped
        kept = _kept[dataset] = _KeptChunks()
    return kept
