# SPDX-License-Identifier: Apache-2.0
"""Iterator of a resumed loader whose state has batches of earlier epochs to deliver again."""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data import DataLoader

from penstock.loader.loader_run import run_of
from penstock.loader.loader_state import begin_repeat
from penstock.loader.options import LoaderOptions


class RepeatsFirst:
    """Batches of earlier epochs that were not committed, and then the epoch that is resumed.

    Each part has an iterator of its own, whose attributes this one has while it is in use.
    """

    def __init__(self, loader: DataLoader[Any], has_epoch: bool = True) -> None:
        """Without ``has_epoch`` end before the epoch that is resumed."""
        self._loader: DataLoader[Any] | None = loader
        self._has_epoch = has_epoch
        self._reshard_count = _ledger(loader).reshard_count
        self._repeated_count = sum(len(one.pulled) for one in _ledger(loader).to_repeat)
        self._part: Any = self._begin_part(loader)

    def __iter__(self) -> RepeatsFirst:
        return self

    def __next__(self) -> Any:
        if self._loader is not None and _ledger(self._loader).reshard_count > self._reshard_count:
            self._reshard_count = _ledger(self._loader).reshard_count
            self._part = None
            self._part = self._begin_part(self._loader)  # the steps are divided by other ranks
        while True:
            try:
                return next(self._part)
            except StopIteration:
                if self._loader is None:
                    raise
                self._part = None
                self._part = self._begin_part(self._loader)

    def __len__(self) -> int:
        if not self._has_epoch:
            return self._repeated_count
        return self._repeated_count + len(self._part if self._loader is None else self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_part":
            raise AttributeError(name)
        return getattr(self._part, name)

    def _begin_part(self, loader: DataLoader[Any]) -> Any:
        owner: Any = loader
        owner._end_persistent()  # they have the seeds of the part before
        ledger = _ledger(loader)
        if not ledger.to_repeat:
            self._loader = None
            return iter(loader) if self._has_epoch else iter(())
        began_at = time.perf_counter()
        options, run = LoaderOptions.of(loader), run_of(loader)
        epoch = ledger.to_repeat[0]
        iterator = begin_repeat(options, run, epoch, owner._begin_iterator)
        del ledger.to_repeat[0]
        owner._note_begun(iterator, began_at)
        return iterator


def _ledger(loader: DataLoader[Any]) -> Any:
    ledger = run_of(loader).commits
    assert ledger is not None
    return ledger
