# SPDX-License-Identifier: Apache-2.0
"""Have the kernel read the files of a worker's next samples ahead of their use.

A worker knows the samples of the batches that it makes next. If its dataset has a list of files,
one for each sample, the files are known, too. Reading files of one batch then overlaps with each
other and with the work on earlier samples, although the dataset reads one file after the other.
This is only advice (``posix_fadvise``): it changes no data, and files in memory are left alone.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from penstock import _C

VARIABLE = "PENSTOCK_READAHEAD"  # 0 switches it off
_DEPTH_MAX = 8  # of datasets in datasets
_PATH_LISTS = ("samples", "paths", "files")  # also as properties
_Files = Callable[[int], list[str]]  # of a sample


class ReadAhead:
    """Advises the kernel for one dataset. Confined to the thread that makes batches."""

    def __init__(self, files_of: _Files) -> None:
        self._files_of = files_of
        self._advisor = _C.ReadAdvisor()
        self._advised_count = 0  # of requests that wait

    @staticmethod
    def of(dataset: Any) -> ReadAhead | None:
        """Return None if the files of its samples are not known, or the variable forbids it."""
        if os.environ.get(VARIABLE, "1") == "0":
            return None
        files_of = files_of_samples(dataset)
        return None if files_of is None else ReadAhead(files_of)

    def note(self, indices: Any) -> None:
        """Advise for the batch that is made now, unless :meth:`note_upcoming` has done it."""
        if self._advised_count > 0:
            self._advised_count -= 1
        else:
            self._advise(indices)

    def note_upcoming(self, indices: Any) -> None:
        """Advise for a batch that follows those noted before; call it once for each."""
        self._advised_count += 1
        self._advise(indices)

    def _advise(self, indices: Any) -> None:
        try:
            indices = [indices] if type(indices) is int else indices
            self._advisor.advise([path for index in indices for path in self._files_of(index)])
        except Exception:
            return  # an index that the dataset itself will reject, or take in its own way


def files_of_samples(dataset: Any, depth: int = 0) -> _Files | None:
    """Return a function from a sample's index to the files that it is in; None if not known.

    Known are lists among the attributes of a dataset that have an entry for each sample: a path, or
    a tuple that begins with one, as in ``samples`` of torchvision's folders. The file of the first
    entry must exist. An attribute that is assigned later is looked up again.
    """
    if depth > _DEPTH_MAX:
        return None
    if isinstance(dataset, Subset):
        inner = files_of_samples(dataset.dataset, depth + 1)
        chosen = dataset.indices
        return None if inner is None else lambda index: inner(chosen[index])
    if isinstance(dataset, ConcatDataset):
        return _of_joined(dataset, depth)
    try:
        sample_count = len(dataset)
        names = [*vars(dataset), *(name for name in _PATH_LISTS if hasattr(type(dataset), name))]
        lists = {name: getattr(dataset, name) for name in names}
    except Exception:  # from a length or a property of the dataset
        return None
    found = {name: one for name, one in lists.items() if _is_list_of_files(one, sample_count)}
    distinct = list({id(one): name for name, one in found.items()}.values())  # imgs is samples
    if not distinct:
        return None
    return lambda index: [_path_of(getattr(dataset, name)[index]) for name in distinct]


def _of_joined(dataset: ConcatDataset[Any], depth: int) -> _Files | None:
    parts = [files_of_samples(one, depth + 1) for one in dataset.datasets]
    ends = dataset.cumulative_sizes
    if all(part is None for part in parts):
        return None

    def files_of(index: int) -> list[str]:
        index += ends[-1] if index < 0 else 0
        place = bisect_right(ends, index)
        part = parts[place]
        return [] if part is None else part(index - (ends[place - 1] if place > 0 else 0))

    return files_of


def _is_list_of_files(value: Any, sample_count: int) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if not is_list or len(value) != sample_count:
        return False
    return sample_count > 0 and (path := _path_of(value[0])) != "" and os.path.isfile(path)


def _path_of(entry: Any) -> str:
    if isinstance(entry, (tuple, list)) and entry:
        entry = entry[0]
    return os.fspath(entry) if isinstance(entry, (str, os.PathLike)) else ""
