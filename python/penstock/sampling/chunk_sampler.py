# SPDX-License-Identifier: Apache-2.0
"""An order of samples in which each chunk of a file is read once."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock import _C
from penstock.sampling.epoch_sampler import EpochSampler

_BLOCK = 4096  # samples drawn at once
_MEASURED_MAX = 1 << 22  # samples of an epoch whose randomness is measured


@dataclass(frozen=True, slots=True)
class ChunkRandomness:
    """How random the order of a :class:`ChunkSampler` is, beside a shuffle of all samples.

    Attributes:
        distance (float): Mean distance, in samples of the file, between two consecutive samples of
            the order, divided by its expectation in a shuffle of all n samples, (n + 1) / 3. A
            shuffle has 1 on average, reading in sequence has 3 / (n + 1).
        chunks_per_batch (float): Mean number of different chunks in a batch.
        chunks_per_batch_of_shuffle (float): The expectation of the same number in a shuffle of all
            samples: over all chunks, the sum of the probability that a batch has a sample of the
            chunk.
    """

    distance: float
    chunks_per_batch: float
    chunks_per_batch_of_shuffle: float


@dataclass(slots=True)
class _ChunkPlace:
    epoch: int
    given_count: int = 0


class ChunkSampler(EpochSampler[int, _ChunkPlace]):
    """Random order of samples in which each chunk of a file is read once.

    A chunk is a part of a file that is read as a whole: a row group of Parquet, a chunk of HDF5 or
    Zarr, a tar shard, a video. The chunks are opened in random order. A window of them is open,
    each sample is a random one of the window, and the next chunk is opened when all samples of one
    were taken. If all chunks fit into the window, the order is a shuffle of all samples.

    With several worker processes or ranks, pass their number as ``readers`` and the ``batch_size``:
    batches then come in turn from separate windows, one for each reader. The order depends only on
    the arguments, the seed and the epoch: it is the same for any number of ranks and workers. Each
    chunk is read once if ranks times workers divides ``readers``. Exceptions are at most ``readers
    - 1`` chunks that are divided between two readers, and the last step of several ranks if it is
    not a full one.

    The dataset must keep the open chunks, as :class:`ChunkedDataset` does. Works with torch's and
    penstock's loaders. Each iteration is the next epoch, starting with epoch 0; :meth:`set_epoch`
    selects another.

    Args:
        chunk_lengths (Sequence[int]): Number of samples of each chunk, 0 or more, in the order of
            the dataset's indices. One chunk or more.
        chunks_in_memory (int): Maximum number of open chunks of a reader, 1 or more. Default: 16.
        readers (int): Number of processes that read, ranks times workers; at least 1. Keep it when
            these numbers change, because the order depends on it. Default: 1.
        batch_size (int | None): Size of a rank's batches, 1 or more. Required if ``readers`` is
            more than 1; does not affect the order otherwise. Default: None.
        shuffle (bool): Use a random order, drawn from ``seed`` and the epoch. False: each reader
            reads its chunks and their samples in sequence. Default: True.
        seed (int): Seed of the orders, 0 or more, the same on all ranks of a job. Default: 0.

    Raises:
        ValueError: If an argument has an invalid value.

    See Also:
        :class:`ChunkedDataset`: a dataset that keeps the open chunks.

    Example::

        sampler = penstock.ChunkSampler(lengths, chunks_in_memory=16, readers=4, batch_size=256)
        loader = penstock.DataLoader(dataset, batch_size=256, sampler=sampler, num_workers=4)
    """

    def __init__(
        self,
        chunk_lengths: Sequence[int],
        chunks_in_memory: int = 16,
        *,
        readers: int = 1,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self._lengths = checked_chunk_lengths(chunk_lengths)
        self.chunks_in_memory = checked_count("chunks_in_memory", chunks_in_memory)
        self.readers = checked_count("readers", readers)
        if batch_size is None and self.readers > 1:
            raise ValueError(
                f"batch_size must be the size of a batch, since readers is {readers}, got None; "
                f"pass the batch_size of the loader"
            )
        self.batch_size = None if batch_size is None else checked_count("batch_size", batch_size)
        super().__init__(shuffle, seed)

    def __repr__(self) -> str:
        parts = [f"<{len(self._lengths)} chunks>", f"chunks_in_memory={self.chunks_in_memory}"]
        if self.readers > 1:
            parts.append(f"readers={self.readers}")
        if self.batch_size is not None:
            parts.append(f"batch_size={self.batch_size}")
        return f"{type(self).__name__}({', '.join([*parts, *self._shown_order()])})"

    @property
    def chunk_lengths(self) -> list[int]:
        """Number of samples of each chunk."""
        lengths: list[int] = self._lengths.tolist()
        return lengths

    def __len__(self) -> int:
        """Return the number of samples of an epoch.

        Returns:
            int: Number of samples, over all chunks.
        """
        return int(self._lengths.sum())

    def randomness(self, batch_size: int | None = None) -> ChunkRandomness:
        """Measure how random the order of the current epoch is.

        The order is drawn and measured, at most its first 4,194,304 samples, in about a second.

        Args:
            batch_size (int | None): Size of the batches whose chunks are counted, 1 or more.
                Default: None, the ``batch_size`` of the sampler, else 1.

        Returns:
            ChunkRandomness: The measures, and those of a shuffle of all samples.

        Raises:
            ValueError: If there are fewer than 2 samples, or ``batch_size`` is invalid.
        """
        size = checked_count("batch_size", 1 if batch_size is None else batch_size)
        if batch_size is None and self.batch_size is not None:
            size = self.batch_size
        count = len(self)
        if count < 2:
            raise ValueError(f"chunk_lengths must add up to 2 samples or more, got {count}")
        size = min(size, count)
        order = self._order(self._place.epoch).next(min(count, max(_MEASURED_MAX, size)))
        distance = float(np.abs(np.diff(order)).mean()) * 3 / (count + 1)
        ends = np.cumsum(self._lengths)
        whole = order[: len(order) // size * size].reshape(-1, size)
        chunks = np.sort(np.searchsorted(ends, whole, side="right"), axis=1)
        chunk_count = 1 + float((np.diff(chunks, axis=1) > 0).sum(axis=1).mean())
        return ChunkRandomness(distance, chunk_count, _chunks_of_shuffle(self._lengths, size))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, for another sampler with the same arguments.

        Returns:
            dict[str, Any]: JSON-serializable, of a fixed size.
        """
        place = self._place
        return {"epoch": place.epoch, "given": place.given_count, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state: the next iteration continues where it was taken.

        The samples before are skipped without drawing them, in about 40 ns each.

        Args:
            state (dict[str, Any]): Result of :meth:`state_dict` of a sampler with the same
                arguments.

        Raises:
            ValueError: If the state is of a sampler with other arguments, or is inconsistent.
        """
        self._check_state(state, **self._identity())
        epoch, given_count = state["epoch"], state["given"]
        if not (type(epoch) is int and type(given_count) is int) or not (
            epoch >= 0 and 0 <= given_count <= len(self)
        ):
            raise ValueError(
                f"the state must have an epoch >= 0 and 0 to {len(self)} samples given, got "
                f"epoch {epoch!r} and {given_count!r}; load a result of state_dict()"
            )
        self._begin_at(_ChunkPlace(epoch, given_count))

    def _identity(self) -> dict[str, Any]:
        """Return all that the order follows from, apart from the epoch."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "chunk_count": len(self._lengths),
            "sample_count": len(self),
            "chunks_sha256": hashlib.sha256(self._lengths.astype("<i8").tobytes()).hexdigest(),
            "chunks_in_memory": self.chunks_in_memory,
            "readers": self.readers,
            "run_length": self._run_length,
        }

    @property
    def _run_length(self) -> int:
        """Number of consecutive samples of one reader."""
        return 1 if self.readers == 1 or self.batch_size is None else self.batch_size

    def _first_place(self, epoch: int) -> _ChunkPlace:
        return _ChunkPlace(epoch)

    def _rest(self, place: _ChunkPlace) -> Iterator[int]:
        order = self._order(place.epoch)
        order.skip(place.given_count)
        while order.left_count:
            for index in order.next(_BLOCK).tolist():
                place.given_count += 1
                yield index

    def _order(self, epoch: int) -> _C.ChunkOrder:
        key = np.random.SeedSequence(self.seed, spawn_key=(epoch,)).generate_state(1, np.uint64)
        return _C.ChunkOrder(
            self._lengths,
            open_max=self.chunks_in_memory,
            reader_count=self.readers,
            run_length=self._run_length,
            shuffle=self.shuffle,
            key=int(key[0]),
        )


def checked_chunk_lengths(chunk_lengths: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the lengths: int64, shape (number of chunks,). Raises ValueError."""
    found = np.asarray(chunk_lengths)
    if found.ndim != 1 or found.size == 0 or found.dtype.kind not in "iu":
        raise ValueError(
            f"chunk_lengths must be one integer per chunk, at least one, got values of the shape "
            f"{found.shape} and the type {found.dtype}; pass the number of samples of each chunk"
        )
    wrong = np.flatnonzero(found < 0)
    if wrong.size:
        raise ValueError(
            f"chunk_lengths must be >= 0, got {found[wrong[0]]} for chunk {wrong[0]}; pass the "
            f"number of samples of each chunk"
        )
    if sum(found.tolist()) > _C.ChunkOrder.SAMPLES_MAX:
        raise ValueError(
            f"chunk_lengths must add up to at most {_C.ChunkOrder.SAMPLES_MAX}, got "
            f"{sum(found.tolist())}; pass the number of samples of each chunk"
        )
    return np.ascontiguousarray(found, dtype=np.int64)


def checked_count(name: str, value: Any) -> int:
    """Return ``value`` if it is an int of at least 1. Raises ValueError."""
    try:
        count = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an int >= 1, got {value!r}") from None
    if not 1 <= count <= _C.ChunkOrder.RUN_MAX:
        raise ValueError(f"{name} must be >= 1 and at most {_C.ChunkOrder.RUN_MAX}, got {count}")
    return count


def _chunks_of_shuffle(lengths: np.ndarray[Any, Any], size: int) -> float:
    """Return the expected number of chunks in a batch of ``size`` samples of a shuffle.

    A chunk of n of N samples has none in a batch with the probability C(N - n, size) / C(N, size).
    """
    count = int(lengths.sum())
    taken = np.arange(size, dtype=np.float64)
    expected = 0.0
    for length, chunk_count in zip(*np.unique(lengths, return_counts=True), strict=True):
        left = count - float(length) - taken
        absent = np.exp(np.sum(np.log(left) - np.log(count - taken))) if left[-1] > 0 else 0.0
        expected += float(chunk_count * (1 - absent))
    return expected
