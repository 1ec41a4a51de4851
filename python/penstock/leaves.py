# SPDX-License-Identifier: Apache-2.0
"""The order in which the tensors of a batch are numbered.

The loader writes the tensors of a batch in this order, the trainer tells them apart by it, and the
text of a prefix names them by it (`leaf 3`). So there is one function, used by all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


def flatten_batch(batch: Any) -> list[torch.Tensor]:
    """Lists the tensors of `batch`, depth first, each distinct tensor object once, at its first
    place.

    Mappings are walked in insertion order, lists, tuples and namedtuples from left to right, and
    dataclass instances field by field. Anything else that is not a tensor holds no leaves.

        >>> x = torch.zeros(2)
        >>> [leaf.shape[0] for leaf in flatten_batch({"a": x, "b": [torch.zeros(3), x]})]
        [2, 3]
    """
    leaves: list[torch.Tensor] = []
    seen: set[int] = set()

    def walk(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            if id(item) not in seen:
                seen.add(id(item))
                leaves.append(item)
        elif isinstance(item, Mapping):
            for value in item.values():
                walk(value)
        elif isinstance(item, (list, tuple)):
            for value in item:
                walk(value)
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            for field in dataclasses.fields(item):
                walk(getattr(item, field.name))

    walk(batch)
    return leaves
