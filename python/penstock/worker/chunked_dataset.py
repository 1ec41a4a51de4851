# SPDX-License-Identifier: Apache-2.0
"""A dataset that keeps the chunks of a file which its next samples are from."""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from torch.utils.data import Dataset

from penstock.sampling.chunk_sampler import checked_chunk_lengths, checked_count

Chunk = TypeVar("Chunk")
# Chunks whose other samples another process takes: they are dropped only as the oldest ones.
_DIVIDED_MAX = 2


class ChunkedDataset(Dataset[Any], Generic[Chunk]):
    """Map-style dataset of the samples of chunks, which keeps the chunks in use in memory.

    For :class:`ChunkSampler`: a process reads a chunk for its first sample, and drops it after its
    last one. At most ``chunks_in_memory`` chunks, and two more whose other samples are read by
    another process, are kept; then the one that was not used for the longest time is dropped. Each
    process keeps its own chunks. They are not part of the dataset's value, and are not pickled.
    Thread-safe; one thread at a time reads chunks.

    Args:
        chunk_lengths (Sequence[int]): Number of samples of each chunk, 0 or more.
        read_chunk (Callable): Called with the number of a chunk, from 0; returns its samples.
            Picklable, for workers that are spawned and for pools.
        chunks_in_memory (int): Number of chunks to keep, 1 or more: the sampler's
            ``chunks_in_memory`` if each process is one of its ``readers``, else as many times more
            as there are readers for each process. Default: 16.
        row (Callable): Called with a chunk and the number of a sample in it, from 0; returns the
            sample. Default: ``chunk[number]``.

    Raises:
        ValueError: If ``chunk_lengths`` or ``chunks_in_memory`` is invalid.

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
        row: Callable[[Any, int], Any] = operator.getitem,
    ) -> None:
        self._ends = np.cumsum(checked_chunk_lengths(chunk_lengths))
        self._read_chunk = read_chunk
        self._row = row
        self._kept_max = checked_count("chunks_in_memory", chunks_in_memory) + _DIVIDED_MAX

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
            chunk = kept.take(chunk_number, length, self._read_chunk, self._kept_max)
        return self._row(chunk, number - first)


class _KeptChunks:
    """Chunks that this process has in memory, the one used last at the end."""

    def __init__(self) -> None:
        self.process_id = os.getpid()
        self.lock = threading.Lock()
        self._chunks: dict[int, tuple[Any, int]] = {}  # with the number of samples not yet taken

    def take(
        self, number: int, length: int, read_chunk: Callable[[int], Any], kept_max: int
    ) -> Any:
        """Return a chunk, of which one sample is taken."""
        chunk, left_count = self._chunks.pop(number, (None, 0))
        if left_count == 0:
            while len(self._chunks) >= kept_max:
                del self._chunks[next(iter(self._chunks))]
            chunk, left_count = read_chunk(number), length
        if left_count > 1:
            self._chunks[number] = chunk, left_count - 1
        return chunk


# Outside of the datasets, so that a dataset is the same value whichever chunks it has read.
_kept: weakref.WeakKeyDictionary[Any, _KeptChunks] = weakref.WeakKeyDictionary()


def _kept_chunks(dataset: ChunkedDataset[Any]) -> _KeptChunks:
    kept = _kept.get(dataset)
    if kept is None or kept.process_id != os.getpid():  # a fork: the trainer's chunks are dropped
        kept = _kept[dataset] = _KeptChunks()
    return kept
