# SPDX-License-Identifier: Apache-2.0
"""The version of the data that a dataset reads, as a short text.

Two texts exist. Ranks compare :func:`dataset_fingerprint`, which distinguishes datasets of one
class and length by the versions that they declare and by their plain content. Folders differ
between machines, and so may attributes of a user's class; neither counts. States keep
:func:`data_version`, for people to read, which also covers the datasets and tables among the
attributes of a dataset. Both read a bounded part of the content, so that they take milliseconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

_ENTRIES_MAX = 10_000  # of a list, evenly spaced
_ROWS_MAX = 1_000  # of a tensor
_ENDS = 512  # characters or bytes of a long text, from its start and from its end
_NAME_PARTS = 2  # of a file's path, from its end: the class and the file
_DEPTH_MAX = 8  # of datasets in datasets
_TEXT_MAX = 80  # of a version's text; a longer one is replaced by its digest


def dataset_fingerprint(dataset: Any) -> str | None:
    """Return a short text that identifies ``dataset``; None if only its class and length are known.

    The text uses the attribute ``fingerprint`` (or ``_fingerprint``, of Hugging Face's datasets) if
    it is a text; lists, arrays and tensors of plain values; ``TensorDataset``; folders of images,
    by the list ``samples`` of paths and classes; and ``Subset`` and ``ConcatDataset`` of such.
    """
    content = _content(dataset)
    return None if content is None else _digest(content)


def data_version(dataset: Any) -> str | None:
    """Return the version of the data that ``dataset`` reads; None if it is not known.

    The first of these that exists: the dataset's ``fingerprint`` or ``version``; the version of
    a table of Hugging Face's datasets, Lance, LanceDB, Deep Lake or Iceberg; the digest of plain
    content, as :func:`dataset_fingerprint` has it; and the versions of the datasets and tables
    among its attributes, at any depth.
    """
    return _version(dataset, 0)


def _version(dataset: Any, depth: int) -> str | None:
    if depth > _DEPTH_MAX:
        return None
    whole = _within_cache(dataset)
    if whole is not None:
        return _version(whole, depth + 1)
    if isinstance(dataset, Subset):
        return _version_of_subset(dataset, depth)
    if isinstance(dataset, ConcatDataset):
        return _joined([_version(one, depth + 1) for one in dataset.datasets])
    found = _declared(dataset) or _of_table(dataset)
    if found is not None:
        return found
    content = _content(dataset)
    if content is not None:
        return f"content {_digest(content)}"
    return _version_of_attributes(dataset, depth)


def _within_cache(dataset: Any) -> Any:
    """Return the dataset that penstock.cached() was given, if it has made ``dataset``."""
    return getattr(dataset, "__dict__", {}).get("cached_dataset")


def _version_of_subset(dataset: Subset[Any], depth: int) -> str | None:
    inner = _version(dataset.dataset, depth + 1)
    selection = vars(dataset).get("selection")  # of penstock.filtered()
    if selection is None:
        entries = _entries(dataset.indices)
        selection = None if entries is None else _digest(entries)
    return None if inner is None or selection is None else f"{inner}, selection {selection}"


def _version_of_attributes(dataset: Any, depth: int) -> str | None:
    """Return the versions of the datasets that a user's dataset holds and reads from."""
    attributes = getattr(dataset, "__dict__", {})
    found = [
        _version(value, depth + 1) if isinstance(value, Dataset) else _of_table(value)
        for _, value in sorted(attributes.items())
        if value is not dataset
    ]
    return _joined([one for one in found if one is not None])


def _joined(versions: list[str | None]) -> str | None:
    known = [one for one in versions if one is not None]
    if len(known) < len(versions) or not known:
        return None
    text = "; ".join(known)
    return text if len(text) <= _TEXT_MAX or len(known) == 1 else f"content {_digest(known)}"


def _declared(dataset: Any) -> str | None:
    declared = getattr(dataset, "fingerprint", None)
    if isinstance(declared, str):
        return f"fingerprint {_short(declared)}"
    if _library(dataset) in _TABLES:
        return None
    declared = getattr(dataset, "version", None)
    if isinstance(declared, (str, int)) and not isinstance(declared, bool):
        return f"version {_short(str(declared))}"
    return None


def _of_table(value: Any) -> str | None:
    """Return the version of a table of a known library, as the library counts them."""
    read = _TABLES.get(_library(value))
    return None if read is None else read(value)


def _library(value: Any) -> str:
    return str(type(value).__module__).partition(".")[0]


def _of_hugging_face(value: Any) -> str | None:
    declared = getattr(value, "_fingerprint", None)
    return f"Hugging Face fingerprint {declared}" if isinstance(declared, str) else None


def _of_lance(value: Any) -> str | None:
    version = getattr(value, "version", None)
    if isinstance(version, bool) or not isinstance(version, int):
        return None
    name = getattr(value, "name", None) or getattr(value, "uri", None)
    return f"Lance version {version} of {_last_part(name)}"


def _of_deep_lake(value: Any) -> str | None:
    version = getattr(value, "version", None) or getattr(value, "commit_id", None)
    return f"Deep Lake version {version}" if isinstance(version, str) else None


def _of_iceberg(value: Any) -> str | None:
    if not hasattr(value, "current_snapshot"):
        return None
    snapshot = value.current_snapshot()
    number = "none" if snapshot is None else snapshot.snapshot_id
    return f"Iceberg snapshot {number} of {value.name()[-1]}"


_TABLES: dict[str, Callable[[Any], str | None]] = {
    "datasets": _of_hugging_face,
    "lance": _of_lance,
    "lancedb": _of_lance,
    "deeplake": _of_deep_lake,
    "pyiceberg": _of_iceberg,
}


def _last_part(name: Any) -> str:
    return _short(PurePath(name).name) if isinstance(name, str) else "a table"


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_MAX else _digest(text)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _content(dataset: Any) -> Any:
    for name in ("fingerprint", "_fingerprint"):
        declared = getattr(dataset, name, None)
        if isinstance(declared, str):
            return declared
    whole = _within_cache(dataset)
    if whole is not None:
        return _content(whole)
    if isinstance(dataset, Subset):
        selection = vars(dataset).get("selection")  # of penstock.filtered()
        if selection is not None:
            return [_content(dataset.dataset) or "unknown", selection]
        return _all_known(_content(dataset.dataset), _entries(dataset.indices))
    if isinstance(dataset, ConcatDataset):
        return _all_known(*map(_content, dataset.datasets))
    if isinstance(dataset, TensorDataset):
        return _all_known(*map(_rows, dataset.tensors))
    files = getattr(dataset, "samples", None)
    return _entries(dataset) if files is None else _entries(files)


def _all_known(*contents: Any) -> Any:
    return None if None in contents else list(contents)


def _entries(values: Any) -> Any:
    if isinstance(values, (torch.Tensor, np.ndarray)):
        return _rows(torch.as_tensor(values)) if _is_numeric(values) else None
    if not isinstance(values, (list, tuple, range)):
        return None
    step = max(1, len(values) // _ENTRIES_MAX)
    plain = [_plain(value) for value in values[::step]]
    return None if None in plain else [len(values), plain]


def _plain(value: Any) -> Any:
    """Return a value in a form for JSON; None if it is not plain."""
    if isinstance(value, bytes):
        return [len(value), value[:_ENDS].hex(), value[-_ENDS:].hex()]
    if isinstance(value, str) and len(value) > 2 * _ENDS:
        return [len(value), value[:_ENDS], value[-_ENDS:]]
    if isinstance(value, PurePath) or (isinstance(value, str) and "/" in value):
        return "/".join(PurePath(value).parts[-_NAME_PARTS:])
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Sequence) and len(value) <= _NAME_PARTS + 1:
        return _all_known(*map(_plain, value))
    return None


def _is_numeric(values: Any) -> bool:
    return isinstance(values, torch.Tensor) or values.dtype.kind in "biuf"


def _rows(tensor: torch.Tensor) -> Any:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return None
    step = max(1, (len(tensor) if tensor.dim() > 0 else 1) // _ROWS_MAX)
    rows = tensor.detach()[::step] if tensor.dim() > 0 else tensor.detach()
    data = rows.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]
