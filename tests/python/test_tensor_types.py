# SPDX-License-Identifier: Apache-2.0
"""Sparse and nested tensors in batches: sent as their components, without pickle and trust."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool_datasets import CODE
from pool_processes import PoolProcesses
from sample_datasets import as_is

from penstock import _C, DataLoader, Pool
from penstock.errors import UnsupportedError
from penstock.stream import batch_types

TENSOR = "torch:Tensor"
JAGGED = "torch.nested._internal.nested_tensor:NestedTensor"


def dense(*shape: int) -> torch.Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    return torch.where(numbers > 0.3, numbers, 0)


def doubled() -> torch.Tensor:
    return torch.sparse_coo_tensor([[2, 0, 2], [1, 1, 1]], [1.0, 2.0, 3.0], (3, 3))


def jagged(*lengths: int, width: int = 2) -> torch.Tensor:
    parts = [dense(length, width) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def narrowed() -> torch.Tensor:
    starts, lengths = torch.tensor([0, 1]), torch.tensor([3, 4])
    return torch.nested.narrow(dense(2, 10), 1, starts, lengths, layout=torch.jagged)


def of_offsets(**lengths: int) -> torch.Tensor:
    offsets = torch.tensor([0, 3, 3, 8])
    return torch.nested.nested_tensor_from_jagged(dense(8, 2), offsets=offsets, **lengths)


def sharing_offsets() -> list[torch.Tensor]:
    tensor = jagged(3, 5)
    return [tensor, tensor * 2]


def csr_of_int32() -> torch.Tensor:
    rows, columns = (torch.tensor(one, dtype=torch.int32) for one in ([0, 1, 2], [0, 1]))
    return torch.sparse_csr_tensor(rows, columns, dense(2), (2, 2))


SPARSE: dict[str, Callable[[], Any]] = {
    "COO": lambda: dense(4, 5).to_sparse(),
    "COO with doubles": doubled,
    "COO in three dimensions": lambda: dense(2, 3, 4).to_sparse(),
    "COO with dense rows": lambda: torch.sparse_coo_tensor([[0, 2]], dense(2, 5), (3, 5)),
    "COO without values": lambda: torch.sparse_coo_tensor(size=(3, 4)),
    "COO of bool": lambda: (dense(4, 4) > 0).to_sparse(),
    "COO of bfloat16": lambda: dense(4, 4).bfloat16().to_sparse(),
    "COO of complex64": lambda: dense(4, 4).to(torch.complex64).to_sparse(),
    "COO on transposed values": lambda: torch.sparse_coo_tensor([[0, 2]], dense(5, 2).t(), (3, 5)),
    "CSR": lambda: dense(4, 5).to_sparse_csr(),
    "CSR with int32": csr_of_int32,
    "CSR of batches": lambda: torch.stack([torch.eye(3), torch.eye(3) * 2]).to_sparse_csr(),
    "CSR without values": lambda: torch.zeros(3, 4).to_sparse_csr(),
    "CSC": lambda: dense(4, 5).to_sparse_csc(),
    "BSR": lambda: dense(4, 6).to_sparse_bsr((2, 3)),
    "BSC": lambda: dense(4, 6).to_sparse_bsc((2, 3)),
}
NESTED: dict[str, Callable[[], Any]] = {
    "jagged": lambda: jagged(3, 5),
    "jagged with an empty part": lambda: jagged(3, 0, 5),
    "jagged in one dimension": lambda: torch.nested.nested_tensor(
        [torch.arange(3), torch.arange(5)], layout=torch.jagged
    ),
    "jagged of int16": lambda: torch.nested.nested_tensor(
        [torch.arange(3), torch.arange(5)], layout=torch.jagged, dtype=torch.int16
    ),
    "jagged, transposed": lambda: jagged(3, 5).transpose(1, 2),
    "jagged with lengths": narrowed,
    "jagged without sequence lengths": of_offsets,
    "jagged with sequence lengths": lambda: of_offsets(min_seqlen=0, max_seqlen=64),
    "jagged in its second dimension": lambda: torch.nested.nested_tensor(
        [dense(2, 3, 4), dense(2, 5, 4)], layout=torch.jagged
    ),
    "strided": lambda: torch.nested.nested_tensor([dense(2, 3), dense(4, 1)]),
    "strided, transposed": lambda: torch.nested.nested_tensor([dense(2, 3), dense(4, 3)]).transpose(
        1, 2
    ),
    "strided with an empty part": lambda: torch.nested.nested_tensor([dense(0, 3), dense(4, 3)]),
}
ALL = {**SPARSE, **NESTED}
TOGETHER: dict[str, Callable[[], Any]] = {
    "in a dict": lambda: {"rows": dense(3), "graph": doubled(), "text": jagged(1, 4)},
    "sharing offsets": sharing_offsets,
}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*(beta|prototype)")
        yield


def parts_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Everything that a tensor consists of: its properties, and its components' bits."""
    about = (type(tensor), tensor.layout, tensor.dtype, tensor.requires_grad, tensor.is_leaf)
    if tensor.layout is torch.sparse_coo:
        more = (tensor.shape, tensor.is_coalesced())
        components = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        more = (tensor.shape,)
        components = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        more = (tensor.shape,)
        components = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif tensor.layout is torch.jagged:
        cache = tensor._metadata_cache  # type: ignore[attr-defined]
        more = (
            tensor._ragged_idx,  # type: ignore[attr-defined]
            {name: (one.shape, one.dtype) for name, one in cache.items()},
            tensor.is_contiguous(),
        )
        components = [tensor._values, tensor._offsets, tensor._lengths]  # type: ignore[attr-defined]
    elif tensor.is_nested:
        more = (tensor.is_contiguous(),)
        components = [
            tensor.values(),
            tensor._nested_tensor_size(),
            tensor._nested_tensor_strides(),
            tensor._nested_tensor_storage_offsets(),
        ]
    else:
        more, components = (), [tensor]
    bits = [
        None if one is None else (one.dtype, one.shape, one.stride(), one.tolist())
        for one in components
    ]
    return (*about, *more, *bits)


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and parts_of(a) == parts_of(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and len(a) == len(b) and all(map(is_same, a, b))


class Made(torch.utils.data.Dataset[Any]):
    def __init__(self, *makes: Callable[[], Any]) -> None:
        self.makes = makes

    def __len__(self) -> int:
        return len(self.makes)

    def __getitem__(self, index: int) -> Any:
        return self.makes[index]()


# torch's worker fails with these: https://github.com/pytorch/pytorch/issues/110543
WITHOUT_ORACLE = [name for name in NESTED if name.startswith("strided")]
ORACLE = [name for name in ALL if name not in WITHOUT_ORACLE]


def round_trip(value: object) -> Any:
    return _C.decode_value(_C.encode_value(value))


@pytest.mark.parametrize("name", ALL)
def test_tensor_is_the_same_after_the_transfer(name: str) -> None:
    value = ALL[name]()
    assert is_same(round_trip(value), value)


def without_unpickling(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.worker import batch_pickle

    def refuse(*_: Any) -> Any:
        raise AssertionError("a batch was pickled")

    monkeypatch.setattr(batch_pickle, "loads", refuse)


def test_local_batches_are_torchs_without_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    without_unpickling(monkeypatch)
    makes = [*(ALL[name] for name in ORACLE), *TOGETHER.values()]
    options: dict[str, Any] = {"batch_size": None, "num_workers": 1, "collate_fn": as_is}
    options["multiprocessing_context"] = "fork"
    theirs = list(torch.utils.data.DataLoader(Made(*makes), **options))
    ours = list(DataLoader(Made(*makes), **options))
    assert len(ours) == len(theirs) == len(makes)
    for one, other in zip(ours, theirs, strict=True):
        assert is_same(one, other)
    made = [ALL[name] for name in WITHOUT_ORACLE]
    for one, make in zip(DataLoader(Made(*made), **options), made, strict=True):
        assert is_same(one, make())


def test_pool_batches_are_torchs_without_trust(steady_pool: PoolProcesses) -> None:
    pool = Pool(steady_pool.endpoint, code_paths=[CODE])
    makes = [*(ALL[name] for name in ORACLE), *TOGETHER.values()]
    options: dict[str, Any] = {"batch_size": None, "collate_fn": as_is}
    loader = DataLoader(Made(*makes), pool=pool, **options)
    ours = list(loader)
    theirs = list(torch.utils.data.DataLoader(Made(*makes), **options))
    assert len(ours) == len(theirs) == len(makes)
    for one, other in zip(ours, theirs, strict=True):
        assert is_same(one, other)
    assert ours[-1][0].shape == ours[-1][1].shape


def test_jagged_tensors_of_a_batch_share_their_offsets() -> None:
    first, second = round_trip(sharing_offsets())
    assert first.offsets() is second.offsets()
    assert torch.equal((first + second).values(), first.values() + second.values())
    with pytest.raises(RuntimeError):
        first + jagged(3, 5)  # another ragged dimension, as everywhere in torch


@pytest.mark.parametrize("name", ALL)
def test_values_are_not_copied(name: str) -> None:
    value = ALL[name]()
    flat = batch_types.flatten(value, True)
    assert flat is not None
    for is_trusted in (True, False):
        made = batch_types.make(*flat, is_trusted)
        if value.layout is torch.sparse_coo:
            assert made._values().data_ptr() == value._values().data_ptr()
        else:
            assert made.values().data_ptr() == value.values().data_ptr()


@pytest.mark.parametrize("name", ["COO", "CSR", "BSC", "jagged", "jagged with lengths", "strided"])
def test_worker_cannot_change_indices_after_their_check(name: str) -> None:
    name, (context, *children) = batch_types.flatten(ALL[name](), True)  # type: ignore[misc]
    children = [one.clone() if isinstance(one, torch.Tensor) else one for one in children]
    made = batch_types.make(name, (context, *children), False)
    before = parts_of(made)
    for one in children:
        if isinstance(one, torch.Tensor) and one.dtype is torch.int64:
            one.fill_(1 << 40)
    assert parts_of(made) == before


def places(*rows: Any) -> torch.Tensor:
    return torch.tensor(rows[0] if len(rows) == 1 else rows)


V = torch.ones(2)
HOSTILE: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "index beyond the shape": (
        TENSOR,
        (["coo", False], places([0, 3], [1, 1]), V, [3, 3]),
        "dimension 0 must be 0 to 2, got 0 to 3",
    ),
    "negative index": (
        TENSOR,
        (["coo", False], places([0, 1], [1, -9]), V, [3, 3]),
        "dimension 1 must be 0 to 2, got -9 to 1",
    ),
    "not coalesced": (
        TENSOR,
        (["coo", True], places([1, 1], [1, 1]), V, [3, 3]),
        "in order, each once",
    ),
    "not in order": (
        TENSOR,
        (["coo", True], places([1, 0], [1, 1]), V, [3, 3]),
        "in order, each once",
    ),
    "more indices than values": (
        TENSOR,
        (["coo", False], places([0, 1, 2], [1, 1, 1]), V, [3, 3]),
        "must fit the shape",
    ),
    "shape of other dimensions": (
        TENSOR,
        (["coo", False], places([0, 1], [1, 1]), V, [3]),
        "must have the dimensions",
    ),
    "shape of no numbers": (
        TENSOR,
        (["coo", False], places([0, 1], [1, 1]), V, [3, "3"]),
        "list of sizes",
    ),
    "shape that overflows": (
        TENSOR,
        (["coo", False], places([0, 1], [1, 1]), V, [1 << 40, 1 << 40]),
        "more than 2",
    ),
    "indices that are floats": (
        TENSOR,
        (["coo", False], torch.zeros(2, 2), V, [3, 3]),
        "must be int64",
    ),
    "indices that are text": (TENSOR, (["coo", False], "01", V, [3, 3]), "component tensors"),
    "no layout": (TENSOR, (["dok"], places([0, 1]), places([0]), V, [3, 3]), "dok"),
    "no children": (TENSOR, (["coo", False],), "not enough values"),
    "rows beyond the values": (
        TENSOR,
        (["csr"], places([0, 5, 2]), places([0, 1]), V, [2, 2]),
        "crow_indices",
    ),
    "column beyond the shape": (
        TENSOR,
        (["csr"], places([0, 1, 2]), places([0, 7]), V, [2, 2]),
        "col_indices < ncols",
    ),
    "row beyond the shape": (
        TENSOR,
        (["csc"], places([0, 1, 2]), places([0, 7]), V, [2, 2]),
        "row_indices < nrows",
    ),
    "block beyond the shape": (
        TENSOR,
        (["bsr"], places([0, 1]), places([7]), torch.ones(1, 2, 2), [2, 4]),
        "col_indices < ncols",
    ),
    "too few rows": (
        TENSOR,
        (["csr"], places([0, 1]), places([0, 1]), V, [2, 2]),
        "crow_indices",
    ),
    "offset beyond the values": (
        JAGGED,
        ([1, None, None], torch.ones(4), places([0, 2, 5]), None),
        "offsets must be 0 to 4, got 0 to 5",
    ),
    "negative offset": (
        JAGGED,
        ([1, None, None], torch.ones(4), places([-1, 2, 4]), None),
        "got -1 to 4",
    ),
    "offsets that decrease": (
        JAGGED,
        ([1, None, None], torch.ones(4), places([0, 3, 1, 4]), None),
        "must lie within the 4 values",
    ),
    "no offset": (
        JAGGED,
        ([1, None, None], torch.ones(4), torch.zeros(0, dtype=torch.int64), None),
        "one offset more",
    ),
    "offsets that are floats": (
        JAGGED,
        ([1, None, None], torch.ones(4), torch.zeros(2), None),
        "offsets and lengths must be integers",
    ),
    "lengths beyond the values": (
        JAGGED,
        ([1, None, None], torch.ones(4), places([0, 2, 4]), places([2, 3])),
        "must lie within the 4 values",
    ),
    "length that overflows": (
        JAGGED,
        ([1, None, None], torch.ones(4), places([0, 2, 4]), places([2, 2**63 - 1])),
        "must lie within the 4 values",
    ),
    "negative length": (
        JAGGED,
        ([1, None, None], torch.ones(4), places([0, 2, 4]), places([2, -1])),
        "must lie within the 4 values",
    ),
    "lengths of other sequences": (
        JAGGED,
        ([1, None, None], torch.ones(4), places([0, 2, 4]), places([2])),
        "one offset more",
    ),
    "maximum below a length": (
        JAGGED,
        ([1, None, 1], torch.ones(4), places([0, 2, 4]), None),
        "the maximum sequence length must be 2 to 2147483647, got 1",
    ),
    "maximum that no kernel takes": (
        JAGGED,
        ([1, None, 1 << 40], torch.ones(4), places([0, 2, 4]), None),
        "the maximum sequence length must be",
    ),
    "minimum above a length": (
        JAGGED,
        ([1, 3, None], torch.ones(4), places([0, 2, 4]), None),
        "the minimum sequence length must be 0 to 2, got 3",
    ),
    "no such dimension": (
        JAGGED,
        ([2, None, None], torch.ones(4), places([0, 2, 4]), None),
        "ragged dimension must be one of 1 to 1",
    ),
    "part beyond the values": (
        TENSOR,
        (["nested"], V, places([[1], [1]]), places([[1], [1]]), places([0, 6])),
        "up to 6",
    ),
    "part before the values": (
        TENSOR,
        (["nested"], torch.ones(6), places([[2]]), places([[1]]), places([-1])),
        "must be 0 or more",
    ),
    "part whose place overflows": (
        TENSOR,
        (["nested"], torch.ones(6), places([[1 << 40]]), places([[1 << 40]]), places([0])),
        "must lie within the 6 values",
    ),
    "parts without strides": (
        TENSOR,
        (["nested"], torch.ones(6), places([[2], [1]]), places([[1]]), places([0, 1])),
        "must fit each other",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_components_of_a_hostile_worker_are_refused(case: str) -> None:
    name, values, seen = HOSTILE[case]
    with pytest.raises(UnsupportedError, match=f"'{name}' does not fit it: .*{seen}"):
        batch_types.make(name, values, False)


def beyond_its_shape() -> torch.Tensor:
    return torch.sparse_coo_tensor(places([0, 1 << 40], [1, 1]), V, (3, 3), check_invariants=False)


def test_error_names_the_worker_of_inconsistent_tensors(steady_pool: PoolProcesses) -> None:
    loader = DataLoader(
        Made(doubled, beyond_its_shape, doubled),
        batch_size=None,
        collate_fn=as_is,
        pool=Pool(steady_pool.endpoint, code_paths=[CODE]),
    )
    batches = iter(loader)
    assert is_same(next(batches), doubled())
    with pytest.raises(
        UnsupportedError,
        match=r"'torch:Tensor' does not fit it: .* got 0 to 1099511627776; the batch came from "
        r"penstock worker \S+$",
    ):
        next(batches)


def of_grad(make: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: make().requires_grad_()


@pytest.mark.parametrize("name", ["COO", "jagged"])
def test_tensor_that_requires_grad_is_as_from_torchs_worker(name: str) -> None:
    make = of_grad(ALL[name])
    with pytest.raises(UnsupportedError, match="register_batch_type|requires grad"):
        _C.encode_value(make())
    options: dict[str, Any] = {"batch_size": None, "num_workers": 1, "collate_fn": as_is}
    options["multiprocessing_context"] = "fork"
    (theirs,) = torch.utils.data.DataLoader(Made(make), **options)
    (ours,) = DataLoader(Made(make), **options)
    assert is_same(ours, theirs)


def test_jagged_tensor_with_an_attribute_is_pickled() -> None:
    tensor = jagged(3, 5)
    tensor.source = "file"  # type: ignore[attr-defined]
    assert batch_types.flatten(tensor, True) is None
    with pytest.raises(UnsupportedError, match="NestedTensor, which pool workers do not send"):
        _C.encode_value(tensor)
