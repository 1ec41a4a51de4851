# SPDX-License-Identifier: Apache-2.0
"""After a resume, our loader gives the same stream as torchdata's StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, SequentialSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from penstock import DataLoader

LOADERS: list[Any] = [StatefulDataLoader, DataLoader]


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> int:
        return index * index


class Tallying(Squares):
    """Has a state that is visible in its samples."""

    def __init__(self) -> None:
        self.tally = 0

    def __getitem__(self, index: int) -> int:
        self.tally += 1
        return 1000 * self.tally + index

    def state_dict(self) -> dict[str, Any]:
        return {"tally": self.tally}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tally = state["tally"]


class Plain(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, 33 - 6 * first, step))


class Placed(Plain):
    """Keeps its place, and forgets it in the first pass after a load."""

    def __init__(self) -> None:
        self.taken = 0
        self.to_skip = 0

    def __iter__(self) -> Iterator[int]:
        self.taken, self.to_skip = self.to_skip, 0
        for value in [*super().__iter__()][self.taken :]:
            self.taken += 1
            yield value

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.to_skip = state["taken"]


class Cursor(Iterator[int]):
    def __init__(self, values: list[int]) -> None:
        self.values = values
        self.taken = 0

    def __next__(self) -> int:
        if self.taken == len(self.values):
            raise StopIteration
        self.taken += 1
        return self.values[self.taken - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class WithCursor(Plain):
    def __iter__(self) -> Iterator[int]:
        return Cursor([*super().__iter__()])


def distributed() -> Any:
    return StatefulDistributedSampler(Squares(), num_replicas=2, rank=1, seed=3)


CASES: dict[str, Any] = {
    "map": lambda: {"dataset": Squares(), "batch_size": 4},
    "map, drop_last": lambda: {"dataset": Squares(), "batch_size": 4, "drop_last": True},
    "map, no batches": lambda: {"dataset": Squares(), "batch_size": None},
    "map, sampler": lambda: {
        "dataset": Squares(),
        "batch_size": 3,
        "sampler": SequentialSampler(range(15)),
    },
    "map, batch_sampler": lambda: {
        "dataset": Squares(),
        "batch_sampler": [[1, 2], [3], [4, 5, 6], [7], [8], [9, 10]],
    },
    "map, stateful sampler": lambda: {
        "dataset": Squares(),
        "batch_size": 2,
        "sampler": distributed(),
    },
    "stateful map": lambda: {"dataset": Tallying(), "batch_size": 4},
    "iterable": lambda: {"dataset": Plain(), "batch_size": 4},
    "iterable, drop_last": lambda: {"dataset": Plain(), "batch_size": 4, "drop_last": True},
    "iterable, no batches": lambda: {"dataset": Plain(), "batch_size": None},
    "stateful iterable": lambda: {"dataset": Placed(), "batch_size": 4},
    "stateful iterator": lambda: {"dataset": WithCursor(), "batch_size": 4},
}


PLACED_AT_THE_END = (CASES["map, stateful sampler"], CASES["stateful iterable"])


def values(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


def resumed(loader_class: Any, case: Any, workers: int, count: int | None) -> list[Any]:
    """The keys that other libraries read, then the rest of the epoch and the whole next one."""
    loader = loader_class(**case(), num_workers=workers)
    iterator = iter(loader)
    if count is None:
        for _ in iterator:
            pass
    else:
        for _ in range(count):
            next(iterator)
    state = loader.state_dict()
    again = loader_class(**case(), num_workers=workers)
    again.load_state_dict(state)
    keys = [state[name] for name in ("_num_yielded", "_iterator_finished") if name in state]
    del iterator
    return [keys if workers == 0 else None, values(again), values(again)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("count", [0, 1, 3, 5, None])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_resumed_and_next_epoch_match_torchdata(case: Any, workers: int, count: int | None) -> None:
    expected, seen = (resumed(each, case, workers, count) for each in LOADERS)
    if (workers, count) == (0, None) and case in PLACED_AT_THE_END:
        assert expected[1] == [], "torchdata puts the new epoch to the end of the last one"
        expected[1] = expected[2]
    assert seen == expected
