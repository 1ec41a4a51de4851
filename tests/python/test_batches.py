# SPDX-License-Identifier: Apache-2.0
"""How batches are passed through our memory: without a copy, each tensor by itself, and whole."""

from __future__ import annotations

import random
import re
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import process_traces
import pytest
import torch
from case_streams import in_batches, one_by_one
from sample_datasets import Computed, as_is, number
from stream_oracle import describe, error_text, next_error, without_frames
from torch.utils.data import TensorDataset, default_collate
from torch.utils.data.dataloader import DataLoader as TorchDataLoader

from penstock import DataLoader


def arena_ranges() -> list[range]:
    """Addresses of this process that are shared with a worker."""
    found = []
    for line in process_traces.arena_mappings():
        start, end = line.split()[0].split("-")
        found.append(range(int(start, 16), int(end, 16)))
    return found


def lies_in_an_arena(tensor: torch.Tensor) -> bool:
    return any(tensor.data_ptr() in addresses for addresses in arena_ranges())


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.arange(4096.0)),
        Computed(4096, float),
        Computed(4096, lambda index: torch.tensor([index])),
        Computed(4096, lambda index: np.full(3, index)),
    ],
    ids=["tensor dataset", "numbers", "tensors", "arrays"],
)
def test_collated_batch_is_delivered_without_a_copy(dataset: Any) -> None:
    for batch in DataLoader(dataset, batch_size=1024, num_workers=2):
        (tensor,) = batch if isinstance(batch, list) else (batch,)
        assert lies_in_an_arena(tensor)


def refuse_to_make(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("torch's default_collate made a tensor of its own")


def without_torchs_tensors(worker_id: int) -> None:
    for name in ("as_tensor", "tensor", "stack"):
        setattr(torch, name, refuse_to_make)


def table_row(index: int) -> dict[str, Any]:
    dense = np.arange(13, dtype=np.float32) + index
    columns = {f"c{column}": np.int64(index * column) for column in range(3)}
    return {"dense": dense, "weight": np.float32(index), "seen": np.bool_(index % 2), **columns}


def test_numpy_rows_are_collated_without_per_value_tensors() -> None:
    """A batch of 4,096 rows of 39 numpy scalars took 25 ms, and one of arrays 13 ms."""
    loader = DataLoader(
        Computed(100, table_row),
        batch_size=50,
        num_workers=1,
        worker_init_fn=without_torchs_tensors,
    )
    for number_of_batch, batch in enumerate(loader):
        expected = default_collate([table_row(50 * number_of_batch + row) for row in range(50)])
        assert list(batch) == list(expected)
        for name, tensor in batch.items():
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(tensor, expected[name])
            assert lies_in_an_arena(tensor)


def two_large(samples: Any) -> Any:
    return default_collate(samples), default_collate(samples)


def test_oversized_collate_output_grows_the_slab() -> None:
    """Its tensors were fresh shared memory in every batch, and the kernel cleared their pages."""
    dataset = Computed(16, lambda index: torch.full((300_000,), float(index)))
    loader = DataLoader(dataset, batch_size=2, num_workers=1, collate_fn=two_large)
    for step, batch in enumerate(loader):
        assert not any(part.is_shared() for part in batch)
        assert all(part[1, -1] == 2 * step + 1 for part in batch)
        assert step == 0 or all(lies_in_an_arena(part) for part in batch)


def test_batch_tensors_are_aligned_to_cache_lines() -> None:
    dataset = Computed(12, lambda index: [torch.ones(k) for k in range(1, 9)])
    for batch in DataLoader(dataset, batch_size=3, num_workers=1):
        assert [part.data_ptr() % 64 for part in batch] == [0] * 8


def test_one_arena_is_mapped_per_worker() -> None:
    mapped_before = arena_ranges()  # of a test that failed, for example
    loader = DataLoader(Computed(60, number), batch_size=2, num_workers=2)
    iterator = iter(loader)
    for _ in range(20):
        next(iterator)
    assert len([addresses for addresses in arena_ranges() if addresses not in mapped_before]) == 2
    assert loader.stats().arenas == 2


def test_views_of_one_tensor_arrive_as_separate_tensors() -> None:
    """Torch's workers keep them one; here each has a storage of exactly its bytes."""

    def views(index: int) -> list[torch.Tensor]:
        whole = torch.arange(6.0)
        return [whole[:4], whole[2:]]

    (batch,) = list(DataLoader(Computed(1, views), batch_size=None, num_workers=1))
    first, second = batch
    first.zero_()
    assert second.tolist() == [2.0, 3.0, 4.0, 5.0]
    assert second.untyped_storage().nbytes() == 16


COMPLEX = torch.complex(torch.arange(3.0), torch.ones(3))
RIGHT_WHERE_TORCH_IS_NOT: dict[str, Any] = {
    "conjugates": lambda: COMPLEX.conj(),
    "negatives": lambda: torch._neg_view(torch.arange(3.0)),
    "imaginary parts of conjugates": lambda: COMPLEX.conj().imag,
    "quantised tensors": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 3, torch.quint8),
}


@pytest.mark.parametrize("name", RIGHT_WHERE_TORCH_IS_NOT)
def test_values_that_torch_workers_lose_are_kept(name: str) -> None:
    """Torch's workers drop the conjugation and the sign, and break quantised tensors."""
    make = RIGHT_WHERE_TORCH_IS_NOT[name]
    (batch,) = list(DataLoader(Computed(1, lambda _: make()), batch_size=None, num_workers=1))
    if batch.is_quantized:
        assert torch.equal(batch.dequantize(), make().dequantize())
    else:
        assert torch.equal(batch.resolve_conj().resolve_neg(), make().resolve_conj().resolve_neg())


def unsendable_error(index: int) -> Any:
    class Hidden(Exception):
        pass

    raise Hidden("found in no module")


UNSENDABLE: dict[str, tuple[Any, str]] = {
    "a lambda": (lambda index: lambda: index, "pickle"),
    "an open file": (lambda index: open("/dev/null"), "pickle"),
    "a generator": (lambda index: (k for k in range(3)), "pickle"),
    "not a leaf": (lambda index: torch.ones(2, requires_grad=True) * 2, "requires_grad"),
    "a named tensor": (lambda index: torch.zeros(2, 3, names=("a", "b")), "[Nn]amed"),
    "an error of a local class": (unsendable_error, "found in no module"),
}


@pytest.mark.parametrize("name", UNSENDABLE)
@pytest.mark.filterwarnings("ignore:Named tensors")
def test_unsendable_batch_raises_and_the_stream_continues(name: str) -> None:
    """Torch's loader waits for ever on it."""
    make, text = UNSENDABLE[name]
    dataset = Computed(4, lambda index: make(index) if index == 1 else number(index))
    iterator = iter(DataLoader(dataset, batch_size=None, num_workers=1, timeout=30))
    assert describe(next(iterator)) == describe(number(0))
    error = next_error(iterator)
    assert str(error).startswith("Caught ")
    assert "in DataLoader worker process 0" in str(error)
    assert re.search(text, str(error)), str(error)
    assert [float(batch[0]) for batch in iterator] == [2.0, 3.0]


class Unloadable:
    """Can be pickled, but not read back."""

    def __reduce__(self) -> Any:
        return (refuse, ())


def refuse() -> Any:
    raise LookupError("cannot be read back")


def test_unloadable_batch_raises_and_the_stream_continues() -> None:
    dataset = Computed(3, lambda index: Unloadable() if index == 1 else number(index))
    loader = DataLoader(dataset, batch_size=None, num_workers=1, collate_fn=as_is)
    iterator = iter(loader)
    next(iterator)
    error = next_error(iterator)
    assert "cannot be read back" in str(error)
    assert float(next(iterator)[0]) == 2.0


class Pair(NamedTuple):
    left: Any
    right: Any


DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16]


def random_tensor(choose: random.Random) -> torch.Tensor:
    shape = [choose.randrange(4) for _ in range(choose.randrange(4))]
    tensor = torch.randint(
        0, 2, shape, generator=torch.Generator().manual_seed(choose.randrange(99))
    )
    tensor = tensor.to(choose.choice(DTYPES))
    for _ in range(choose.randrange(3)):
        if tensor.dim() > 1:
            tensor = tensor.transpose(*choose.sample(range(tensor.dim()), 2))
        if tensor.dim() > 0 and tensor.shape[0] > 1:
            tensor = tensor[:: choose.choice([1, 2])]
    return tensor


def random_value(choose: random.Random, depth: int) -> Any:
    """A nest of the kinds of values in samples. The same seed gives the same nest."""
    kind = choose.randrange(12 if depth else 7)
    if kind < 2:
        return random_tensor(choose)
    if kind < 7:
        leaves: list[Any] = [
            choose.uniform(-1e3, 1e3),
            choose.randrange(-(2**62), 2**62),
            choose.random() < 0.5,
            "".join(chr(choose.randrange(1, 0x2FF)) for _ in range(choose.randrange(9))),
            np.arange(choose.randrange(5), dtype=choose.choice(["f4", "i8", "u1"])),
        ]
        return leaves[kind - 2]
    children = [random_value(choose, depth - 1) for _ in range(choose.randrange(1, 4))]
    if kind == 7:
        return tuple(children)
    if kind == 8:
        return children
    if kind == 9:
        return Pair(children[0], children[-1])
    keys = [f"key {k}" for k in range(len(children))]
    items = dict(zip(keys, children, strict=True))
    return items if kind == 10 else OrderedDict(items)


def seen_by(loader_class: type, arguments: dict[str, Any]) -> list[Any]:
    seen = []
    iterator = iter(loader_class(num_workers=1, timeout=60, **arguments))
    for _ in range(len(iterator)):
        try:
            seen.append(describe(next(iterator)))
        except Exception as error:
            seen.append(error_text(without_frames(error))[2])
    return seen


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("arrange", [in_batches, one_by_one])
def test_random_nested_samples_match_torch(arrange: Any, seed: int) -> None:
    """Samples of one batch share the same nest, with one exception in eight."""

    def samples(case: int) -> Any:
        changed = random.Random(seed + case).random() < 0.125
        return [random_value(random.Random(seed + case + (changed and k)), 3) for k in range(3)]

    cases = {f"nest {case}": (lambda case=case: samples(case)) for case in range(600)}
    arguments = arrange(cases)
    assert seen_by(DataLoader, arguments) == seen_by(TorchDataLoader, arguments)
