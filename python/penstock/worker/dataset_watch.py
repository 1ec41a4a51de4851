# SPDX-License-Identifier: Apache-2.0
"""Detect whether a worker's dataset changes while samples are fetched, at limited cost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch

from penstock import _C
from penstock.errors import PoolWarning

# An early epoch saves a trainer about one batch's time, so an inspection must not take longer.
_LOOK_S_MIN = 0.005  # always allowed, also before the first batch
_LOOK_S_MAX = 0.25
# After so many changes in a row, the dataset is assumed to change always.
_CHANGES_MAX = 3
# The number of batches after which a worker first checks whether they have changed its dataset.
_FIRST_LOOK = 4

_CHANGED_BY_EARLY_SAMPLES = (
    "Samples of an epoch that never started have changed the dataset: {count} batches of the next "
    "epoch were made early, the program started another epoch, and the dataset now differs "
    "from before those batches. No earlier epoch had changed it, so this was not expected. "
    "Samples from now on may differ from those of torch's loader; pass overlap_epochs=False for "
    "this dataset"
)


class Watch(Protocol):
    def is_unchanged(self, batch_s: float) -> bool:
        """Return whether the dataset is known to be unchanged since before the ending epoch.

        ``batch_s`` is this worker's time for a batch.
        """
        ...

    def note_dropped(self, batch_count: int) -> None:
        """Record that so many batches of an epoch that never starts followed `is_unchanged`."""
        ...


class RowsWatch:
    """Watches tensors whose rows are gathered natively, which changes no state."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self._rows = rows
        self._are_own: bool | None = None  # constant once it is known

    def is_unchanged(self, batch_s: float) -> bool:
        if self._are_own is None:
            self._are_own = _C.are_own(self._rows)
        return self._are_own

    def note_dropped(self, batch_count: int) -> None:
        pass


class FetchWatch:
    """Detects whether the batches that a worker made have left its dataset unchanged.

    If so, another worker may make one of its batches again without an observable difference.
    ``watch`` is queried after some batches, and then whenever their number has doubled. Confined to
    one thread.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._batch_count = 0
        self._next_look = _FIRST_LOOK
        self._fetching_s = 0.0
        self._dataset_stays = False  # until the first inspection

    def note_batch(self, fetching_s: float) -> bool:
        """Call after each batch, with the time that it took. Return whether the dataset is
        unchanged, as far as the last inspection could detect."""
        self._batch_count += 1
        self._fetching_s += fetching_s
        if self._batch_count == self._next_look:
            self._next_look *= 2
            self._dataset_stays = self._watch.is_unchanged(self._fetching_s / self._batch_count)
        return self._dataset_stays


class DatasetWatch:
    """Compares a dataset with its state at the previous inspection.

    ``look`` receives the seconds that it may take. Its result equals the previous one if the
    dataset is unchanged; None if that is unknown. Confined to one thread.
    """

    def __init__(self, look: Callable[[float], Any]) -> None:
        self._look = look
        self._change_count = 0  # in a row
        self._allowed_s = self._failed_s = 0.0
        self._before: Any = None
        self._take_fingerprint(_LOOK_S_MIN)

    def is_unchanged(self, batch_s: float) -> bool:
        """Compare with the previous inspection, which may be epochs ago. A failed inspection is
        repeated when twice the time is allowed.
        """
        allowed_s = min(_LOOK_S_MAX, max(_LOOK_S_MIN, batch_s))
        if self._change_count == _CHANGES_MAX or allowed_s < 2 * self._failed_s:
            return False
        before, now = self._before, self._take_fingerprint(allowed_s)
        if now is None or before is None:
            return False
        is_unchanged = bool(now == before)
        self._change_count = 0 if is_unchanged else self._change_count + 1
        return is_unchanged

    def note_dropped(self, batch_count: int) -> None:
        before, now = self._before, self._take_fingerprint(self._allowed_s)
        if now is None or now != before:
            self._change_count = _CHANGES_MAX
            text = _CHANGED_BY_EARLY_SAMPLES.format(count=batch_count)
            warnings.warn(text, PoolWarning, stacklevel=2)

    def _take_fingerprint(self, allowed_s: float) -> Any:
        self._allowed_s = allowed_s
        self._before = self._look(allowed_s)
        self._failed_s = allowed_s if self._before is None else 0.0
        return self._before
