# SPDX-License-Identifier: Apache-2.0
"""Every operation of a program on a lazy tensor gives the same result as on a plain one."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from multiprocessing import resource_sharer
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
import torch.nn.functional as F
from offload_training import bits

from penstock.tracking.batch_origin import BatchHandle, Provenance, ProvenanceTable
from penstock.tracking.deferral import Deferral
from penstock.tracking.lazy_tensor import LazyTensor

Tensor = torch.Tensor


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


LINEAR = torch.nn.Linear(3, 2)
TRACED = torch.jit.trace(LINEAR, torch.zeros(4, 3))


def saved(y: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    assert type(loaded) is Tensor
    return loaded


def with_data(y: Tensor) -> Tensor:
    y.data = torch.ones(2, 2)
    return y


def with_an_element(y: Tensor) -> Tensor:
    y[0, 0] = 9
    return y


def in_inference(y: Tensor) -> Tensor:
    with torch.inference_mode():
        return y + 1


def with_a_seed(draw: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def seeded(y: Tensor) -> Tensor:
        torch.manual_seed(0)
        return draw(y)

    return seeded


def gradient_of_a_weight(y: Tensor) -> Tensor:
    return torch.autograd.grad(LINEAR(y).square().sum(), LINEAR.weight)[0]


USES: dict[str, Callable[[Any], Any]] = {
    # Asked without values.
    "attributes": lambda y: (y.dtype, y.shape, y.stride(), y.device, y.layout, y.names, y.nbytes),
    "more_attributes": lambda y: (len(y), y.numel(), y.ndim, y.element_size(), y.storage_offset()),
    "questions": lambda y: (y.is_contiguous(), y.requires_grad, y.is_leaf, y.is_sparse, y.type()),
    "is_a_tensor": lambda y: (isinstance(y, Tensor), torch.is_tensor(y), y.is_floating_point()),
    "same_object": lambda y: (y.to("cpu") is y, y.float() is y, y.contiguous() is y, y.cpu() is y),
    "hash": lambda y: {y: 1}[y] + (weakref.ref(y)() is y),
    # Read.
    "str": str,
    "format": lambda y: f"{y[0, 0]:.3f}",
    "numpy": lambda y: y.numpy(),
    "numpy_force": lambda y: y.numpy(force=True),
    "asarray": np.asarray,
    "array": lambda y: np.array(y, dtype=np.float64),
    "ufunc": lambda y: np.add(y, 1),
    "tolist": lambda y: y.tolist(),
    "item": lambda y: (y[1, 1].item(), int(y[1, 1]), bool(y[0, 0]), 3.0 in y),
    "as_an_index": lambda y: list(range(99))[y[1, 0].int()],
    "iteration": lambda y: [*y, *reversed(y)],
    "mask": lambda y: y[y > 2],
    "index_of_another": lambda y: torch.ones(5, 5)[y.long()[:, 0] % 4],
    "stack": lambda y: torch.stack([y, y]),
    "cat_with_a_new_one": lambda y: torch.cat([y, torch.ones(1, 3)]),
    "equal": lambda y: (torch.equal(y, y.clone()), torch.allclose(y, y + 0)),
    "sort": lambda y: (*y.sort(), *y.topk(2), *y.max(dim=1)),
    "sizes_of_contents": lambda y: (y.unique(), y.nonzero(), *torch.where(y > 2)),
    "einsum": lambda y: torch.einsum("ij,kj->ik", y, y),
    "fft": torch.fft.rfft,
    "view_dtype": lambda y: y.view(torch.int32),
    "as_strided": lambda y: y.as_strided((2, 2), (1, 1)),
    "unfold": lambda y: y.unfold(0, 2, 1),
    "complex": lambda y: torch.complex(y, y).conj().resolve_conj(),
    "sparse": lambda y: y.to_sparse().to_dense(),
    "quantized": lambda y: torch.quantize_per_tensor(y, 0.1, 0, torch.qint8).dequantize(),
    "half": lambda y: (y.half(), y.bfloat16().float(), y.type(torch.int32)),
    "like": lambda y: (torch.zeros_like(y), y.new_zeros(2), y.new_tensor([1, 2])),
    "copied_from": lambda y: torch.zeros(4, 3).copy_(y),
    "put_into_another": lambda y: torch.zeros(4, 3).index_put_((torch.tensor([0]),), y[1]),
    "storage": lambda y: y.untyped_storage().nbytes(),
    "shared_memory": lambda y: y.share_memory_().is_shared(),
    "dlpack": torch.from_dlpack,
    "numpy_dlpack": np.from_dlpack,
    "tensor": lambda y: torch.tensor(y.tolist()),
    "as_tensor": torch.as_tensor,
    "apply": lambda y: y.clone().apply_(lambda a: a + 1),
    "collate": lambda y: torch.utils.data.default_collate([{"a": y}, {"a": y}])["a"],
    # Copied.
    "deepcopy": copy.deepcopy,
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
    "save": saved,
    "detached": lambda y: y.detach() * 2 + y.data,
    # Written.
    "set_data": with_data,
    "set_element": with_an_element,
    "out": lambda y: torch.add(y, 1, out=torch.empty(4, 3)),
    "resize": lambda y: y.clone().resize_(2, 3),
    # Differentiated and transformed.
    "vmap": lambda y: torch.vmap(lambda row: row.sum())(y),
    "func_grad": lambda y: torch.func.grad(lambda z: (z * z).sum())(y),
    "requires_grad": lambda y: torch.autograd.grad((y.requires_grad_() ** 2).sum(), y)[0],
    "jacobian": lambda y: torch.autograd.functional.jacobian(lambda z: z.sum(0), y),
    "linear": lambda y: LINEAR(y).detach(),
    "weight_gradient": gradient_of_a_weight,
    "script": scripted,
    "trace": lambda y: TRACED(y).detach(),
    "batch_norm": lambda y: torch.nn.BatchNorm1d(3)(y).detach(),
    "cross_entropy": lambda y: F.cross_entropy(y, torch.tensor([0, 1, 2, 0])),
    "embedding": lambda y: F.embedding(y.long() % 3, torch.eye(3)),
    "interpolate": lambda y: F.interpolate(y[None, None], scale_factor=2),
    "inference": in_inference,
    # Random.
    "rand_like": with_a_seed(torch.rand_like),
    "dropout": with_a_seed(F.dropout),
    # An error, in the right place.
    "out_of_range": lambda y: y[7],
    "wrong_shape": lambda y: y @ torch.ones(2, 2),
    "bool_minus": lambda y: (y > 1) - (y > 2),
    "divided_by_zero": lambda y: y.int() // torch.zeros(3, dtype=torch.int32),
}


def numbers() -> Tensor:
    return torch.arange(12.0).view(4, 3) * 7 % 5


def lazy_numbers(deferral: Deferral, table: ProvenanceTable) -> Tensor:
    leaf = numbers()
    handle = BatchHandle(1)
    table.record(leaf, Provenance(handle, 0, leaf._version))
    return deferral.follow(handle, [leaf])[id(leaf)]


def seen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), bits(value)
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    return [seen(item) for item in value] if isinstance(value, (list, tuple)) else value


def outcome(use: Callable[[Any], Any], tensor: Tensor) -> Any:
    try:
        return seen(use(tensor))
    except Exception as error:
        return type(error)


@pytest.mark.sampled(50)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [lambda x: x, lambda x: x * 2, lambda x: x[:, 1:].repeat(1, 2)])
@pytest.mark.parametrize("name", USES)
def test_lazy_tensor_behaves_like_a_plain_one(name: str, make: Callable[[Tensor], Tensor]) -> None:
    use = USES[name]
    table = ProvenanceTable()
    deferral = Deferral(table)
    for _ in range(3):
        lazy = make(lazy_numbers(deferral, table))
        assert type(lazy) is LazyTensor
        result, expected = outcome(use, lazy), outcome(use, make(numbers()))
        assert result == expected


def _take_and_write(given: Any, answers: Any) -> None:
    tensor = given.get(timeout=60)
    answers.put((type(tensor) is Tensor, tensor.tolist()))
    tensor.fill_(-1)
    answers.put("written")


def _given_away(tensor: Tensor) -> tuple[Any, Any]:
    """The values that another process finds in a queue, and the values seen here once that process
    has written to it."""
    context = torch.multiprocessing.get_context("fork")
    given, answers = context.Queue(), context.Queue()
    process = context.Process(target=_take_and_write, args=(given, answers))
    process.start()
    try:
        given.put(tensor)
        found = answers.get(timeout=60)
        assert answers.get(timeout=60) == "written"
        process.join(60)
        return found, tensor.tolist()
    finally:
        process.kill()
        process.join()
        for queue in (given, answers):
            queue.close()
            queue.join_thread()
        resource_sharer.stop(60)  # the thread that hands over descriptors, and its socket


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x * 2], ids=["a leaf", "made of one"])
def test_other_process_receives_a_plain_tensor(make: Callable[[Tensor], Tensor]) -> None:
    table = ProvenanceTable()
    lazy = make(lazy_numbers(Deferral(table), table))
    assert type(lazy) is LazyTensor
    found, seen_here = _given_away(lazy)
    assert found == (True, make(numbers()).tolist())
    assert (found, seen_here) == _given_away(make(numbers()))
