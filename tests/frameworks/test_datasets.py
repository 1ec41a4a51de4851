# SPDX-License-Identifier: Apache-2.0
"""datasets: batches read by __getitems__, and epochs that persistent workers are notified of."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset
from stream_oracle import describe
from torch.utils.data import DataLoader

import penstock

pytestmark = pytest.mark.slow


def make_table() -> Dataset:
    columns = {"number": list(range(24)), "word": [f"w{i}" for i in range(24)]}
    return Dataset.from_dict({**columns, "vector": [[i / 3, 1.0] for i in range(24)]})


def read_a_table() -> tuple[Any, Any]:
    loader = DataLoader(
        make_table().with_format("torch"), batch_size=5, shuffle=True, num_workers=2
    )
    return [describe(batch) for _ in range(2) for batch in loader], loader


def read_a_stream() -> tuple[Any, Any]:
    stream = make_table().to_iterable_dataset(num_shards=4).shuffle(seed=2, buffer_size=6)
    loader = DataLoader(stream.with_format("torch"), batch_size=5, num_workers=2)
    return [describe(batch) for _ in range(2) for batch in loader], loader


def set_epochs_of_persistent_workers() -> tuple[Any, Any]:
    stream = make_table().to_iterable_dataset(num_shards=4).shuffle(seed=2, buffer_size=6)
    stream = stream.with_format("torch")
    loader = DataLoader(stream, batch_size=5, num_workers=2, persistent_workers=True)
    epochs = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        epochs.append([batch["number"].tolist() for batch in loader])
    numbers = [sorted(sum(epoch, [])) for epoch in epochs]
    assert numbers == 3 * [list(range(24))]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0], "the workers did not hear of epochs"
    return epochs, loader


@pytest.mark.long("penstock-read_a_stream")
@pytest.mark.parametrize("run", [read_a_table, read_a_stream, set_epochs_of_persistent_workers])
def test_dataset_batches_match_torch(
    run: Callable[[], Any],
    same_as_torch: Callable[..., Any],
    assert_used: Callable[[Any], None],
) -> None:
    assert_used(same_as_torch(run))


def sizes_of_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call of `__getitems__` asked for, in the workers; reported in the
    batch."""
    whole = Dataset.__getitems__

    def __getitems__(self: Dataset, keys: list[int]) -> list[dict[str, Any]]:
        return [{**row, "asked": len(keys)} for row in whole(self, keys)]

    monkeypatch.setattr(Dataset, "__getitems__", __getitems__)
    loader = DataLoader(make_table(), batch_size=10, num_workers=1)
    return [int(asked) for batch in loader for asked in batch["asked"].unique()]


@pytest.mark.usefixtures("loader_name")
def test_batch_is_read_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sizes_of_reads(monkeypatch) == [10, 10, 4]


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_resumes_from_its_own_state(workers: int) -> None:
    def make() -> Any:
        stream = make_table().to_iterable_dataset(num_shards=4).with_format("torch")
        return penstock.DataLoader(stream, batch_size=5, num_workers=workers)

    expected = [batch["number"].tolist() for batch in make()]
    loader = make()
    loader.state_dict()  # workers send their datasets' states from the first one on
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    assert all("examples_iterable" in each["dataset"] for each in state["shards"]["states"])
    resumed = make()
    resumed.load_state_dict(state)
    assert [batch["number"].tolist() for batch in resumed] == expected[2:]
