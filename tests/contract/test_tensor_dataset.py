# SPDX-License-Identifier: Apache-2.0
"""TensorDataset, which a loader may gather a batch at a time: no observable detail differs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from case_streams import Cases, assert_same_outcomes
from sample_datasets import as_is, worker_id
from stream_oracle import Scenario, assert_same_stream
from torch.utils.data import (
    ConcatDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

DTYPES = (
    "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 "
    "complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
).split()
ROWS = 11


def counted(dtype: str, *shape: int) -> torch.Tensor:
    """Rows that differ from each other in every dtype."""
    generator = torch.Generator().manual_seed(9)
    flat = torch.randint(0, 2, (ROWS, *shape), generator=generator)
    values = flat + 2 * torch.arange(ROWS).reshape(-1, *[1] * len(shape))
    return values.to(getattr(torch, dtype))


class Doubling(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * part for part in super().__getitem__(index))


class Renamed(TensorDataset):
    """Without changes: only its class is another one."""


class WholeBatches(TensorDataset):
    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, ...]]:
        return [tuple(-part[index] for part in self.tensors) for index in indices]


class Tagged(torch.Tensor):
    """A tensor subclass, which keeps its class when it is indexed."""


def two() -> TensorDataset:
    return TensorDataset(counted("float32", 3), counted("int64"))


def replaced_by_list() -> TensorDataset:
    dataset = two()
    dataset.tensors = list(dataset.tensors)  # type: ignore[assignment]
    return dataset


def patched_instance() -> TensorDataset:
    dataset = two()
    dataset.tensors = (counted("int16", 2),)
    return dataset


def with_parts(*parts: Any) -> TensorDataset:
    """The tensors were replaced by other objects."""
    dataset = two()
    dataset.tensors = parts
    return dataset


def several() -> TensorDataset:
    return TensorDataset(
        counted("uint8", 2, 3, 4), counted("float64"), counted("bool", 5), counted("bfloat16", 1)
    )


def twice_the_same() -> TensorDataset:
    rows = counted("float32", 2)
    return TensorDataset(rows, rows)


KINDS: dict[str, Any] = {
    "one tensor": lambda: TensorDataset(counted("float32", 4)),
    "two tensors": two,
    "several tensors": several,
    "the same tensor twice": twice_the_same,
    "a subclass with its own __getitem__": lambda: Doubling(counted("float32", 2)),
    "a subclass that adds nothing": lambda: Renamed(counted("float32", 2)),
    "a subclass with __getitems__": lambda: WholeBatches(counted("float32", 2)),
    "a subset": lambda: Subset(two(), [9, 2, 2, 0, 5]),
    "a subset of a subset": lambda: Subset(Subset(two(), [9, 2, 0, 5]), [3, 1]),
    "concatenated": lambda: ConcatDataset([two(), two()]),
    "replaced tensors": patched_instance,
    "arrays in the place of tensors": lambda: with_parts(
        torch.ones(ROWS), np.arange(22).reshape(11, 2)
    ),
    "lists in the place of tensors": lambda: with_parts(torch.ones(ROWS), list(range(ROWS))),
    "a first part that is an array": lambda: with_parts(torch.ones(ROWS).numpy(), torch.ones(ROWS)),
    "tensors of different lengths": lambda: with_parts(torch.ones(ROWS), torch.ones(3)),
    "a list of tensors": lambda: replaced_by_list(),
    "rows of no elements": lambda: TensorDataset(torch.empty(ROWS, 0, 3)),
    "no rows": lambda: TensorDataset(torch.empty(0, 3)),
    "a transposed tensor": lambda: TensorDataset(counted("float32", 4).T.contiguous().T),
    "rows that are transposed": lambda: TensorDataset(counted("float32", 2, 3).mT),
    "every second row": lambda: TensorDataset(torch.arange(44.0).reshape(22, 2)[::2]),
    "every second column": lambda: TensorDataset(torch.arange(44.0).reshape(11, 4)[:, 1::2]),
    "an expanded tensor": lambda: TensorDataset(torch.arange(3.0).expand(ROWS, 3)),
    "expanded rows": lambda: TensorDataset(torch.arange(11.0).unsqueeze(1).expand(ROWS, 4)),
    "channels last": lambda: TensorDataset(
        counted("float32", 2, 3, 4).to(memory_format=torch.channels_last)
    ),
    "a conjugate": lambda: TensorDataset(torch.complex(*torch.rand(2, ROWS, 2)).conj()),
    "a negative": lambda: TensorDataset(torch._neg_view(torch.rand(ROWS, 2))),
    "a tensor that requires grad": lambda: TensorDataset(torch.rand(ROWS, 2, requires_grad=True)),
    "a parameter": lambda: TensorDataset(torch.nn.Parameter(torch.rand(ROWS, 2))),
    "a tensor subclass": lambda: TensorDataset(torch.rand(ROWS, 2).as_subclass(Tagged)),
    "a sparse tensor": lambda: TensorDataset(torch.eye(ROWS).to_sparse()),
    "a meta tensor": lambda: TensorDataset(torch.empty(ROWS, 2, device="meta")),
    "many dimensions": lambda: TensorDataset(counted("int8", *[1, 2] * 5)),
    "rows of a megabyte": lambda: TensorDataset(torch.rand(3, 1 << 18)),
}

TRAVEL_ROW_BY_ROW = {"two tensors", "channels last", "a tensor subclass", "a sparse tensor"}

SCENARIOS = (
    [
        Scenario(
            f"{kind}, {how}, {workers} workers",
            make,
            {"num_workers": workers, "batch_size": batch_size, "shuffle": True},
        )
        for kind, make in KINDS.items()
        for how, workers, batch_size in (
            ("in batches", 0, 4),
            ("in batches", 1, 4),
            ("row by row", 1, None),
        )
        if batch_size or kind in TRAVEL_ROW_BY_ROW
    ]
    + [
        Scenario(
            f"every dtype, {workers} workers",
            lambda: TensorDataset(*(counted(dtype, 3) for dtype in DTYPES)),
            {"batch_size": 3, "num_workers": workers, "shuffle": True},
        )
        for workers in (0, 1)
    ]
    + [
        Scenario(f"{name}, {workers} workers", two, {"num_workers": workers, **options})
        for workers in (0, 2)
        for name, options in (
            ("in order", {"batch_size": 4}),
            ("drop_last", {"batch_size": 4, "drop_last": True}),
            ("one batch for all", {"batch_size": 99}),
            ("batches of one", {"batch_size": 1, "shuffle": True}),
            ("default_collate by name", {"batch_size": 4, "collate_fn": default_collate}),
            ("own collate_fn", {"batch_size": 4, "collate_fn": as_is}),
            ("partial collate_fn", {"batch_size": 4, "collate_fn": partial(default_collate)}),
        )
    ]
)


@pytest.mark.sampled(25)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_tensor_dataset_batches_match_torch(loader_class: type, scenario: Scenario) -> None:
    assert_same_stream(loader_class, scenario)


class Ordinal:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


INDICES: dict[str, Callable[[], list[Any]]] = {
    "negative": lambda: [-1, -ROWS, 0],
    "one past the end": lambda: [0, 1, ROWS, 2],
    "one before the start": lambda: [0, -ROWS - 1],
    "bools": lambda: [True, False],
    "bools among ints": lambda: [1, True, 0],
    "zero-dimensional tensors": lambda: list(torch.arange(4)),
    "int32 tensors": lambda: list(torch.arange(4, dtype=torch.int32)),
    "a tensor of indices": lambda: torch.arange(4),
    "an array of indices": lambda: np.arange(4),
    "a tuple of indices": lambda: (3, 1),
    "bool tensors": lambda: [torch.tensor(True)],
    "one-dimensional tensors": lambda: [torch.tensor([1, 2]), torch.tensor([3, 4])],
    "float tensors": lambda: [torch.tensor(1.0)],
    "numpy integers": lambda: list(np.arange(4)),
    "slices": lambda: [slice(0, 2), slice(2, 4)],
    "lists": lambda: [[0, 1], [2, 3]],
    "tuples": lambda: [(0,), (1,)],
    "floats": lambda: [1.0],
    "strings": lambda: ["1"],
    "None": lambda: [None, None],
    "ellipsis": lambda: [...],
    "objects with __index__": lambda: [Ordinal(3), Ordinal(1)],
    "beyond 64 bits": lambda: [2**64],
    "beyond 63 bits": lambda: [2**63],
    "no indices": list,
}


def by_indices(make_dataset: Callable[[], Any], cases: Cases) -> dict[str, Any]:
    return {"dataset": make_dataset(), "batch_sampler": [make() for make in cases.values()]}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make_dataset", [two, lambda: Renamed(two().tensors[0])])
def test_tensor_dataset_indices_behave_as_with_torch(
    loader_class: type, make_dataset: Callable[[], Any], workers: int
) -> None:
    arrange = partial(by_indices, make_dataset)
    assert_same_outcomes(loader_class, INDICES, arrange, num_workers=workers)


def scale_by_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.tensors = tuple(10 + worker + part for part in info.dataset.tensors)  # type: ignore[attr-defined]


def test_worker_init_fn_can_change_a_tensor_dataset(loader_class: type) -> None:
    assert_same_stream(
        loader_class,
        Scenario(
            "scaled", two, {"batch_size": 2, "num_workers": 2, "worker_init_fn": scale_by_worker}
        ),
    )


def swap_getitem(worker: int) -> None:
    """A class changed in the worker, as monkey-patching libraries do."""
    TensorDataset.__getitem__ = lambda self, index: ("patched", index, worker_id())  # type: ignore[method-assign, assignment]


def test_patched_getitem_of_a_tensor_dataset_is_used(loader_class: type) -> None:
    assert_same_stream(
        loader_class,
        Scenario(
            "patched", two, {"batch_size": 2, "num_workers": 2, "worker_init_fn": swap_getitem}
        ),
    )


def test_tensor_changes_between_epochs_are_seen(loader_class: type) -> None:
    dataset = two()
    loader = loader_class(dataset, batch_size=ROWS, num_workers=1)
    (before,) = list(loader)
    dataset.tensors[0].mul_(3)
    (after,) = list(loader)
    assert torch.equal(3 * before[0], after[0])


def test_batches_of_a_tensor_dataset_are_copies(loader_class: type) -> None:
    rows = torch.arange(8.0)
    for (batch,) in loader_class(TensorDataset(rows), batch_size=4, num_workers=1):
        batch.fill_(-1)
    for (batch,) in loader_class(TensorDataset(rows), batch_size=4):
        batch.fill_(-1)
    assert torch.equal(rows, torch.arange(8.0))
