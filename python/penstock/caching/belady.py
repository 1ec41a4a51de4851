# SPDX-License-Identifier: Apache-2.0
"""A cache of rows that are read again and again, which keeps the rows that are read soonest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock import _C


class BeladyStep(NamedTuple):
    """Contents of a :class:`BeladyCache` before and after a step.

    A slot is the place of a key in the cache, from 0. No two keys of the cache share a slot, and a
    key keeps its slot until it is evicted.

    Attributes:
        slots (torch.Tensor): Slot of each key of the step before it, int64; -1 for a key that was
            not in the cache and must be read.
        kept_slots (torch.Tensor): Slot of each key of the step after it, int64; -1 for a key that
            is not kept. Write rows there after all rows at ``slots`` have been read.
        evicted (torch.Tensor): Keys that were in the cache and no longer are, int64.
    """

    slots: torch.Tensor
    kept_slots: torch.Tensor
    evicted: torch.Tensor


class BeladyCache:
    """Decides which keys a cache keeps, from the keys that are read next.

    For rows that are read more than once an epoch: of an embedding table, of a file with the
    features of a graph's nodes. It replaces the key whose next read is latest, which is L. A.
    Belady's rule, and does not keep a key that is read later than all others. If ``coming`` covers
    the rest of the reads, no cache of that capacity has fewer misses; with a window, keys that it
    does not show count as read last, the least recently read ones first. It holds no rows: slots
    are numbers of rows in a tensor of the program's. Not thread-safe.

    Args:
        capacity (int): Number of keys that may be kept; with ``sizes``, the sum of their sizes.

    Raises:
        ValueError: If ``capacity`` is negative.

    See Also:
        :meth:`DataLoader.lookahead`, which returns the keys of the next batches; :func:`cached`,
        for samples that are read once an epoch.

    Example::

        cache, held = penstock.BeladyCache(rows), torch.empty(rows, width)
        for ids, labels in loader:
            step = cache.read(ids, loader.lookahead(16, lambda batch: batch[0]))
            found = torch.empty(len(ids), width)
            found[step.slots >= 0] = held[step.slots[step.slots >= 0]]
            found[step.slots < 0] = read_from_disk(ids[step.slots < 0])
            held[step.kept_slots[step.kept_slots >= 0]] = found[step.kept_slots >= 0]
    """

    def __init__(self, capacity: int) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 0:
            raise ValueError(
                f"capacity must be an int >= 0, got {capacity!r}; pass the number of keys to keep"
            )
        self._policy = _C.BeladyCache(capacity)

    def read(self, keys: Any, coming: Iterable[Any] = (), sizes: Any = None) -> BeladyStep:
        """Read the keys of a step, one after the other.

        Args:
            keys (torch.Tensor | numpy.ndarray | Sequence[int]): Keys of the step. A key that occurs
                more than once is read as often, so pass unique keys.
            coming (Iterable): Keys of the following steps, as far as they are known, the next one
                first. Steps that were passed before are taken to be the same and are not examined
                again; if another step is read than was announced, all of them are.
            sizes (Sequence[int] | None): Size of each key, at least 1. Default: None, 1 each.

        Returns:
            BeladyStep: Where the keys were, where they are kept, and which keys were evicted.

        Raises:
            ValueError: If ``keys`` or ``coming`` are not integers, or ``sizes`` has another length
                than ``keys`` or a size below 1.
        """
        of_step = _integers(keys, "keys")
        of_sizes = None if sizes is None else _integers(sizes, "sizes")
        if of_sizes is not None and (of_sizes.size != of_step.size or (of_sizes < 1).any()):
            raise ValueError(
                f"sizes must have a size >= 1 for each of the {of_step.size} keys, got {sizes!r}; "
                f"pass one size for each key"
            )
        known_count = self._policy.begin(of_step)
        for step in itertools.islice(coming, known_count, None):
            self._policy.foresee(_integers(step, "coming"))
        parts = self._policy.read(of_step, None if of_sizes is None else of_sizes.astype(np.uint64))
        return BeladyStep(*map(torch.from_numpy, parts))

    def slots(self, keys: Any) -> torch.Tensor:
        """Return the slot of each key, int64; -1 for a key that is not in the cache.

        Args:
            keys (torch.Tensor | numpy.ndarray | Sequence[int]): Keys to look for. This counts as no
                read.
        """
        return torch.from_numpy(self._policy.slots(_integers(keys, "keys")))

    @property
    def capacity(self) -> int:
        """Number of keys that may be kept, or the sum of their sizes."""
        return self._policy.capacity

    @property
    def hits(self) -> int:
        """Number of keys read so far that were in the cache."""
        return self._policy.hit_count

    @property
    def misses(self) -> int:
        """Number of keys read so far that were not in the cache."""
        return self._policy.miss_count

    def __len__(self) -> int:
        """Return the number of keys in the cache."""
        return self._policy.kept_count

    def __repr__(self) -> str:
        return f"<BeladyCache of {len(self)} keys, {self.hits} hits, {self.misses} misses>"


def _integers(keys: Any, name: str) -> np.ndarray[Any, Any]:
    values = keys.detach().cpu().numpy() if isinstance(keys, torch.Tensor) else np.asarray(keys)
    if values.dtype.kind not in "iu" and values.size > 0:
        raise ValueError(
            f"{name} must be integers, got {values.dtype}; pass the numbers of the rows, or number "
            f"other keys"
        )
    return np.ascontiguousarray(values.reshape(-1), np.int64)
