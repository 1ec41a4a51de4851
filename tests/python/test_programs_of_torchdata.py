# SPDX-License-Identifier: Apache-2.0
"""Programs that were written for torchdata's StatefulDataLoader: its argument, and the checkpoints
that it saved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from resumed_streams import COUNT, Counted, Shards, StatefulSampler, rest_of, state_after, whole
from stream_oracle import error_of
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock import DataLoader


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [1, 4, np.int64(3)])
def test_a_state_is_exact_after_every_batch_however_often_torchdata_would_take_one(
    workers: int, steps: int
) -> None:
    def make() -> Any:
        return DataLoader(Counted(), 4, num_workers=workers, snapshot_every_n_steps=steps)

    expected = whole(make)
    for count in (1, 3):
        assert rest_of(make, state_after(make, count)) == expected[count:]


@pytest.mark.parametrize(
    ("steps", "kind"), [(0, ValueError), (-2, ValueError), ("1", TypeError), (1.5, TypeError)]
)
def test_a_number_of_steps_that_is_none_is_refused_by_name(steps: Any, kind: type) -> None:
    error = error_of(lambda: DataLoader(Counted(), snapshot_every_n_steps=steps))
    assert type(error) is kind
    assert f"snapshot_every_n_steps is {steps!r}" in str(error)


@pytest.mark.parametrize("is_under_way", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        lambda: {"dataset": Counted(), "shuffle": True},
        lambda: {"dataset": Counted(), "sampler": StatefulSampler()},
        lambda: {"dataset": Shards()},
    ],
    ids=["map", "stateful sampler", "iterable"],
)
def test_a_checkpoint_of_torchdata_is_refused_by_name(
    options: Any, workers: int, is_under_way: bool
) -> None:
    theirs: Any = StatefulDataLoader(**options(), batch_size=4, num_workers=workers)
    iterator = iter(theirs)
    for _ in zip(range(1 if is_under_way else COUNT), iterator, strict=False):
        pass
    loader: Any = DataLoader(**options(), batch_size=4, num_workers=workers)
    error = error_of(lambda: loader.load_state_dict(theirs.state_dict()))
    assert type(error) is ValueError
    assert "is of StatefulDataLoader of torchdata" in str(error)
    assert "finish the epoch with torchdata, or begin a new epoch" in str(error)
    assert len([*loader]) > 0, "the loader is as it was"
