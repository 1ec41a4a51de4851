# SPDX-License-Identifier: Apache-2.0
"""A short text that tells datasets of one class and length apart, for ranks to compare.

It looks at what a dataset says of itself and at plain content, a bounded part of it, so that it
takes milliseconds. Folders differ from machine to machine, and so may attributes of a user's own
class; neither counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

_ENTRIES_MAX = 10_000  # of a list, evenly spaced
_ROWS_MAX = 1_000  # of a tensor
_NAME_PARTS = 2  # of a file's path, from its end: the class and the file


def dataset_fingerprint(dataset: Any) -> str | None:
    """None for a dataset of which nothing is known but its class and length.

    Known are the attribute ``fingerprint`` (or ``_fingerprint``, of Hugging Face's datasets) where
    it is a text; lists, arrays and tensors of plain values; ``TensorDataset``; folders of images,
    by the list ``samples`` of paths and classes; and ``Subset`` and ``ConcatDataset`` of such.
    """
    content = _content(dataset)
    if content is None:
        return None
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _content(dataset: Any) -> Any:
    for name in ("fingerprint", "_fingerprint"):
        said = getattr(dataset, name, None)
        if isinstance(said, str):
            return said
    if isinstance(dataset, Subset):
        return _all_known(_content(dataset.dataset), _entries(dataset.indices))
    if isinstance(dataset, ConcatDataset):
        return _all_known(*map(_content, dataset.datasets))
    if isinstance(dataset, TensorDataset):
        return [_rows(tensor) for tensor in dataset.tensors]
    files = getattr(dataset, "samples", None)
    return _entries(dataset) if files is None else _entries(files)


def _all_known(*contents: Any) -> Any:
    return None if None in contents else list(contents)


def _entries(values: Any) -> Any:
    if isinstance(values, (torch.Tensor, np.ndarray)):
        return _rows(torch.as_tensor(values)) if _is_of_numbers(values) else None
    if not isinstance(values, (list, tuple, range)):
        return None
    step = max(1, len(values) // _ENTRIES_MAX)
    plain = [_plain(value) for value in values[::step]]
    return None if None in plain else [len(values), plain]


def _plain(value: Any) -> Any:
    """A value as JSON can have it; None if it is not plain."""
    if isinstance(value, PurePath) or (isinstance(value, str) and "/" in value):
        return "/".join(PurePath(value).parts[-_NAME_PARTS:])
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Sequence) and len(value) <= _NAME_PARTS + 1:
        return _all_known(*map(_plain, value))
    return None


def _is_of_numbers(values: Any) -> bool:
    return isinstance(values, torch.Tensor) or values.dtype.kind in "biuf"


def _rows(tensor: torch.Tensor) -> Any:
    step = max(1, (len(tensor) if tensor.dim() > 0 else 1) // _ROWS_MAX)
    rows = tensor.detach()[::step] if tensor.dim() > 0 else tensor.detach()
    data = rows.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]
