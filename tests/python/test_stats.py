# SPDX-License-Identifier: Apache-2.0
"""What a loader says of itself in words, and that its warnings can be told apart."""

from __future__ import annotations

import re
import threading
import time
import warnings
from typing import Any

import pytest
from torch.utils.data import Dataset

import penstock
from penstock import DataLoader


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        time.sleep(0.005)
        return index


def test_before_the_first_epoch_there_is_nothing_to_say() -> None:
    assert str(DataLoader([1]).stats()) == "DataLoader has not been iterated over"


@pytest.mark.slow
def test_it_says_how_much_of_the_time_the_trainer_waited() -> None:
    loader = DataLoader(Slow(), batch_size=4, num_workers=1)
    for _ in loader:
        pass
    stats = loader.stats()
    assert stats.epochs_s >= stats.wait_s > 0.1
    text = str(stats)
    found = re.search(r"10 batches of .* MB in .* s, and the trainer waited (\d+) %", text)
    assert found is not None and int(found[1]) > 50, text
    assert re.search(r"workers spent 2\d(\.\d)? ms on a batch|workers spent \d+", text), text


def test_warnings_of_pools_can_be_filtered_by_name() -> None:
    assert issubclass(penstock.PoolWarning, UserWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", penstock.PoolWarning)
        warnings.warn("a pool", penstock.PoolWarning, stacklevel=1)


class HasLock(Slow):
    def __init__(self) -> None:
        self.cache = {"of": [threading.Lock()]}


@pytest.mark.slow
def test_what_cannot_be_pickled_for_fresh_workers_is_named() -> None:
    loader: Any = DataLoader(HasLock(), num_workers=1, multiprocessing_context="spawn")
    with pytest.warns(UserWarning, match="pickle error"), pytest.raises(TypeError) as caught:
        iter(loader)
    assert "cannot pickle '_thread.lock' object" in str(caught.value)
    note = caught.value.__notes__[-1]  # after those of Python 3.14's pickle, one an object
    assert note.startswith("dataset.cache['of'][0], a lock, cannot be pickled"), note
