# SPDX-License-Identifier: Apache-2.0
"""Recognises datasets whose batches are only rows of tensors, gathered by index.

The same rule serves the worker, which gathers them without Python, and the trainer, which may
request more of them ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from penstock import _C
from penstock.compat.iterators import torch_collate

# As torch ships it, even if the program changed the registry before it imported penstock.
_COLLATE_FN_MAP: dict[Any, Any] = {
    torch.Tensor: torch_collate.collate_tensor_fn,
    float: torch_collate.collate_float_fn,
    int: torch_collate.collate_int_fn,
    str: torch_collate.collate_str_fn,
    bytes: torch_collate.collate_str_fn,
    np.ndarray: torch_collate.collate_numpy_array_fn,
    (np.bool_, np.number, np.object_): torch_collate.collate_numpy_scalar_fn,
}


def is_collate_map_untouched() -> bool:
    """Return whether default_collate is still the one that torch shipped."""
    current = torch_collate.default_collate_fn_map
    return len(current) == len(_COLLATE_FN_MAP) and all(
        current.get(kind) is collate_fn for kind, collate_fn in _COLLATE_FN_MAP.items()
    )


def plain_rows(dataset: Any, collate_fn: Callable[[Any], Any]) -> list[torch.Tensor] | None:
    """Return the tensors of a plain TensorDataset under torch's default_collate, or None."""
    if type(dataset) is not TensorDataset or collate_fn is not torch_collate.default_collate:
        return None
    if not dataset.tensors or not is_collate_map_untouched() or hasattr(dataset, "__getitems__"):
        return None
    getitem = TensorDataset.__getitem__  # a user may have replaced it
    if (getitem.__module__, getitem.__qualname__) != (
        "torch.utils.data.dataset",
        "TensorDataset.__getitem__",
    ):
        return None
    if all(_C.is_plain_tensor(tensor) and tensor.dim() > 0 for tensor in dataset.tensors):
        return list(dataset.tensors)
    return None
