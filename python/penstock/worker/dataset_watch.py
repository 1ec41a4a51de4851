# SPDX-License-Identifier: Apache-2.0
"""Whether a worker's dataset changes while samples are fetched, and how much looking is worth."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch

from penstock import _C
from penstock.errors import PoolWarning

# An early epoch saves a trainer about one batch's time, so a look takes no longer than that.
_LOOK_S_MIN = 0.005  # as long as that may be, also before the first batch
_LOOK_S_MAX = 0.25
# A dataset that was found changed so often in a row is one that changes.
_CHANGES_MAX = 3
# After this many batches a worker is asked for the first time whether they have changed its
# dataset.
_FIRST_LOOK = 4

_CHANGED_BY_EARLY_SAMPLES = (
    "Samples of an epoch that never began have changed the dataset: {count} batches of the next "
    "epoch were made early, the program began another epoch, and the dataset is another one than "
    "before those batches. No earlier epoch had changed it, so that this was not expected. "
    "Samples from now on may differ from those of torch's loader; pass overlap_epochs=False for "
    "this dataset"
)


class Watch(Protocol):
    def has_stayed(self, batch_s: float) -> bool:
        """Whether the dataset is known to be as it was before the epoch that ends.

        ``batch_s`` is this worker's time for a batch.
        """
        ...

    def note_dropped(self, batch_count: int) -> None:
        """So many batches were made of an epoch that does not begin, after :meth:`has_stayed`."""
        ...


class RowsWatch:
    """Watches tensors whose rows are gathered natively, which changes nothing."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self._rows = rows
        self._are_own: bool | None = None  # which they stay, once it is known

    def has_stayed(self, batch_s: float) -> bool:
        if self._are_own is None:
            self._are_own = _C.are_own(self._rows)
        return self._are_own

    def note_dropped(self, batch_count: int) -> None:
        pass


class FetchWatch:
    """Whether the batches that a worker made have left its dataset as it was.

    Then another worker may make a batch of this one's once more, and nobody will see it. ``watch``
    is asked after some batches, and each time when there were twice as many. Confined to one
    thread.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._batch_count = 0
        self._next_look = _FIRST_LOOK
        self._fetching_s = 0.0
        self._dataset_stays = False  # not before the first look

    def note_batch(self, fetching_s: float) -> bool:
        """To be called after each batch, with the time that it took; returns whether the dataset
        stays as it is, as far as the last look could tell."""
        self._batch_count += 1
        self._fetching_s += fetching_s
        if self._batch_count == self._next_look:
            self._next_look *= 2
            self._dataset_stays = self._watch.has_stayed(self._fetching_s / self._batch_count)
        return self._dataset_stays


class DatasetWatch:
    """Compares a dataset with its state at the look before.

    ``look`` is given how many seconds it may take. Its result equals the one before if nothing has
    changed; None when it cannot tell. Confined to one thread.
    """

    def __init__(self, look: Callable[[float], Any]) -> None:
        self._look = look
        self._change_count = 0  # in a row
        self._allowed_s = self._failed_s = 0.0
        self._before: Any = None
        self._look_again(_LOOK_S_MIN)

    def has_stayed(self, batch_s: float) -> bool:
        """Compares with the look before, which may be epochs ago. A look that failed is tried
        again when twice the time is allowed.
        """
        allowed_s = min(_LOOK_S_MAX, max(_LOOK_S_MIN, batch_s))
        if self._change_count == _CHANGES_MAX or allowed_s < 2 * self._failed_s:
            return False
        before, now = self._before, self._look_again(allowed_s)
        if now is None or before is None:
            return False
        has_stayed = bool(now == before)
        self._change_count = 0 if has_stayed else self._change_count + 1
        return has_stayed

    def note_dropped(self, batch_count: int) -> None:
        before, now = self._before, self._look_again(self._allowed_s)
        if now is None or now != before:
            self._change_count = _CHANGES_MAX
            text = _CHANGED_BY_EARLY_SAMPLES.format(count=batch_count)
            warnings.warn(text, PoolWarning, stacklevel=2)

    def _look_again(self, allowed_s: float) -> Any:
        self._allowed_s = allowed_s
        self._before = self._look(allowed_s)
        self._failed_s = allowed_s if self._before is None else 0.0
        return self._before
