# SPDX-License-Identifier: Apache-2.0
"""A dataset that keeps its samples in memory or on disk once they were made.

An epoch reads each sample once, in an order that differs from the last epoch's. A cache that evicts
the least recently used sample then evicts nearly every sample before it is read again, while one
that is filled once and never evicts hits its share of the data exactly, which is the optimum
(``csrc/cache``).

Right values come first. A sample is served only if its digest matches; one that draws random
numbers while it is made is not stored; and some are made twice and compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from penstock import _C
from penstock._version import __version__
from penstock.caching.disk_store import DiskStore
from penstock.caching.draws import DrawWatch, are_others_drawing
from penstock.caching.memory_store import MISSING, Count, MemoryStore
from penstock.loader.cache_stats import CacheStats, HasSampleCache
from penstock.loader.data_version import dataset_fingerprint
from penstock.program_line import warn
from penstock.stream.batch_seeds import GeneratorsKept, accepts_generator
from penstock.tuning.byte_sizes import checked_bytes
from penstock.tuning.process_resources import memory_left_bytes
from penstock.worker.batch_pickle import dumps_stored, loads
from penstock.worker.read_ahead import files_of_samples
from penstock.worker.threaded_fetch import fetches_whole_batches

_T = TypeVar("_T")

_COMPARED_FIRST, _COMPARED_EVERY = 4, 32  # of the samples that are made to be stored
_HEAD_BYTES = 64  # of a stored sample, with its digest and its size
_TAG_MASK = (1 << 64) - 1
_CHECKED_PLACES = (0.0, 0.25, 0.5, 0.75)  # of samples on disk, among all samples
_UNCERTAIN_MAX = 64  # samples that other threads' draws keep out of the cache, before a warning


def cached(
    dataset: Dataset[_T],
    *,
    memory: int | str | None = None,
    disk: str | tuple[str | os.PathLike[str], int | str] | None = None,
    version: str | None = None,
) -> CachedDataset[_T]:
    """Keep the samples of a map-style dataset in memory, on disk, or both.

    Wrap the part of a dataset whose samples are the same in each epoch, such as decoding, and leave
    random augmentation outside. A sample is stored when it is first made, until the budget is used
    up, and never evicted, so from the second epoch on the share of hits is the share of the data
    that the budget holds. Each hit returns a new object, equal in type, dtype, shape, strides and
    all bits. Batches, states and generators are the same as without the cache.

    The memory is shared by this process and the local workers that it starts, also by workers of
    later epochs; other ranks and pool workers each have their own. The disk is shared by all
    processes of this machine and by later runs. With both, a sample is stored in both.

    A sample during whose making a generator moved is not stored: torch's, NumPy's or Python's
    global generator, or one in an attribute of the dataset. Of the others, the first 4 and then
    every 32nd are made twice; if two makings differ, the dataset is not cached from then on. This
    function makes up to 4 of the samples that it finds on disk, and deletes the dataset's samples
    there if one differs. Each of these is warned about.

    Args:
        dataset (Dataset): Map-style dataset with a length. Its samples must be picklable and on the
            CPU. Only samples at integers from 0 to its length are cached.
        memory (int | str | None): Memory for samples: bytes, or a text such as ``"2GB"`` or
            ``"512MiB"``. At most the memory that is free. Default: None, none.
        disk (str | tuple | None): Folder and budget for samples on a local disk, such as
            ``"/nvme/cache:500GB"`` or ``(path, bytes)``. It is created with access for this user
            alone. Default: None, no disk.
        version (str | None): For ``disk``: any text that you change if the samples change in a way
            that the dataset does not show, such as another size of decoded images. Required if
            penstock cannot identify the dataset's content. Default: None.

    Returns:
        CachedDataset: The dataset. Attributes of ``dataset`` can be read from it.

    Raises:
        ValueError: If ``dataset`` is not map-style or takes a ``generator``, neither ``memory`` nor
            ``disk`` is given, a budget is not a size or above the free memory, or ``disk`` has a
            file that is not a cache.
        PermissionError: If ``disk`` belongs to another user or others may write to it.

    See Also:
        :class:`BeladyCache`, for rows that are read more than once an epoch; :class:`SharedList`,
        for the list of a dataset's files.

    Example::

        decoded = penstock.cached(Decoded(paths), memory="32GB")
        loader = penstock.DataLoader(Augmented(decoded), shuffle=True, num_workers=8)
        print(decoded.stats())
    """
    _check(dataset)
    if memory is None and disk is None:
        raise ValueError(
            'memory or disk must be given, got neither; pass memory="2GB" or disk="/path:500GB"'
        )
    memory_bytes = 0 if memory is None else checked_bytes("memory", memory)
    folder = None if disk is None else _folder_of(disk, dataset, version)
    made = _make(dataset, memory_bytes, folder)
    made._check_disk()
    return made


@dataclass(frozen=True, slots=True)
class _Folder:
    path: Path
    budget_bytes: int
    key: str

    def open(self) -> DiskStore:
        return DiskStore(self.path, self.budget_bytes, self.key)


def _make(dataset: Any, memory_bytes: int, folder: _Folder | None) -> CachedDataset[Any]:
    """Return a dataset with an empty memory; also in a process that received it from another
    machine."""
    left_bytes = memory_left_bytes()
    if left_bytes is not None and memory_bytes > left_bytes:
        raise ValueError(
            f"memory must be at most the {left_bytes:,} bytes that are free on this machine or in "
            f"its cgroup, got {memory_bytes:,}; lower it, and leave room for workers and batches"
        )
    store = MemoryStore(len(dataset), memory_bytes)
    return _with_stores(dataset, memory_bytes, folder, store, folder.open() if folder else None)


def _with_stores(dataset: Any, *parts: Any) -> CachedDataset[Any]:
    kind: Any = _CachedBatches if fetches_whole_batches(dataset) else CachedDataset
    made: CachedDataset[Any] = kind.__new__(kind)
    made._set(dataset, *parts)
    return made


class CachedDataset(Dataset[_T], HasSampleCache):
    """Dataset with a cache, made by :func:`cached`.

    Other attributes are read from the dataset that it caches. Picklable: sent to a
    process on this machine that multiprocessing starts, it shares the memory; otherwise the copy
    starts with an empty one of the same budget.

    Attributes:
        cached_dataset (Dataset): The dataset that was passed to :func:`cached`.
    """

    cached_dataset: Any

    def __init__(self) -> None:
        raise TypeError("a CachedDataset is made by penstock.cached(dataset, memory=...)")

    def _set(
        self,
        dataset: Any,
        memory_bytes: int,
        folder: _Folder | None,
        store: MemoryStore,
        disk: DiskStore | None,
    ) -> None:
        self.cached_dataset = dataset
        self._memory_bytes, self._folder = memory_bytes, folder
        self._store, self._disk = store, disk
        self._sample_count = len(dataset)
        self._files_of = files_of_samples(dataset)

    def __len__(self) -> int:
        return len(self.cached_dataset)

    def __getitem__(self, index: Any) -> _T:
        place = self._place_of(index)
        if place is None:
            return self.cached_dataset[index]  # type: ignore[no-any-return]
        tag = 0 if self._files_of is None else self._tag_of(place)
        found = self._store.get(place, tag, loads, MISSING)
        if found is MISSING:
            found = self._look_up_on_disk(place, tag)
        if found is MISSING:
            made = self._made([place], [tag], lambda: [self.cached_dataset[place]])
            return made[0]  # type: ignore[no-any-return]
        return found  # type: ignore[no-any-return]

    def stats(self) -> CacheStats:
        """Return the reads and the contents, counted over all processes that share the memory."""
        count, native = self._store.counted, self._store.native
        entries, held_bytes, barred = native.contents()
        if native.are_all_barred:
            entries, held_bytes, barred = 0, 0, native.sample_count
        return CacheStats(
            hits=count(Count.HIT),
            disk_hits=count(Count.DISK_HIT),
            misses=count(Count.MISS),
            hit_bytes=count(Count.HIT_BYTES),
            disk_hit_bytes=count(Count.DISK_HIT_BYTES),
            entries=entries,
            bytes=held_bytes,
            budget_bytes=native.budget_bytes,
            disk_entries=count(Count.DISK_ENTRY),
            disk_bytes=count(Count.DISK_ENTRY_BYTES),
            random=barred,
            compared=count(Count.COMPARED),
            damaged=count(Count.DAMAGED),
            uncertain=count(Count.UNCERTAIN),
        )

    def keep_only(self, indices: range) -> None:
        """Store only these samples from now on, in all processes that share the memory.

        ``Ranks(share="by_cache")`` calls it with the samples that the rank owns. If less than 40 %
        of the next 256 samples that are made are among them, any sample is stored again.

        Args:
            indices (range): Consecutive indices, from 0 to ``len(self)``; not empty.

        Raises:
            ValueError: If they are not.
        """
        first, end = indices.start, indices.stop
        if indices.step != 1 or not 0 <= first < end <= self._sample_count:
            raise ValueError(
                f"indices must be a range of step 1 within the {self._sample_count} samples of the "
                f"dataset, got {indices!r}"
            )
        self._store.native.keep_only(first, end)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "cached_dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.cached_dataset, name)

    def __reduce__(self) -> Any:
        if context.get_spawning_popen() is not None:
            parts = (self._memory_bytes, self._folder, self._store, self._disk)
            return _with_stores, (self.cached_dataset, *parts)
        return _make, (self.cached_dataset, self._memory_bytes, self._folder)

    def __repr__(self) -> str:
        kinds = [f"{self._memory_bytes:,} bytes of memory"] if self._memory_bytes else []
        kinds += [f"{self._folder.budget_bytes:,} bytes on disk"] if self._folder else []
        return f"<{type(self.cached_dataset).__name__} cached in {' and '.join(kinds)}>"

    def _place_of(self, index: Any) -> int | None:
        """Return the index of a sample that may be cached; None for any other index."""
        if type(index) is not int and not isinstance(index, np.integer):
            return None
        return int(index) if 0 <= index < self._sample_count else None

    def _tag_of(self, place: int) -> int:
        """Return a number that changes with the sample's files; 0 if they are not known."""
        if self._files_of is None:
            return 0
        try:
            found = [os.stat(file) for file in self._files_of(place)]
        except (OSError, ValueError, LookupError, TypeError):
            return 0
        parts = tuple((one.st_size, one.st_mtime_ns, one.st_ino) for one in found)
        return hash(parts) & _TAG_MASK if parts else 0

    def _check_disk(self) -> None:
        """Make some samples that an earlier run has left on disk, and compare them."""
        if self._disk is None:
            return
        try:
            found = self._disk.some(_CHECKED_PLACES, self._sample_count)
        except sqlite3.Error as error:
            self._give_up_disk(error)
            return
        for place, data in found.items():
            tag = self._tag_of(place)
            if _C.load_sample(place, tag, data, loads, MISSING) is MISSING:
                continue  # it will not be served, either
            with GeneratorsKept():
                sample = self.cached_dataset[place]
            made = self._encoded(place, sample).to_bytes(place, tag)
            if made[:_HEAD_BYTES] != data[:_HEAD_BYTES]:
                self._disk.clear()
                self._warn_once(Count.DISK_WARN, _DISK_STALE, index=place)
                return

    def _look_up(self, place: int, tag: int) -> Any:
        found = self._store.get(place, tag, loads, MISSING)
        return self._look_up_on_disk(place, tag) if found is MISSING else found

    def _look_up_on_disk(self, place: int, tag: int) -> Any:
        if self._disk is None or self._store.is_barred(place):
            return MISSING
        try:
            found, size = self._disk.get(place, tag)
        except sqlite3.Error as error:
            self._give_up_disk(error)
            return MISSING
        if found is not MISSING:
            self._store.count(Count.DISK_HIT)
            self._store.count(Count.DISK_HIT_BYTES, size)
            if self._store.native.has_room(place):
                self._store.native.put(place, tag, _C.StorableSample(found, dumps_stored))
        elif size > 0:
            self._store.count(Count.DAMAGED)
        return found

    def _made(self, places: list[int], tags: list[int], make: Callable[[], Any]) -> list[Any]:
        """Make samples, and store them unless they are random."""
        store = self._store
        store.count(Count.MISS, len(places))
        for place in places:
            store.native.note_missed(place)
        may_write = self._may_write_disk and any(map(store.native.keeps, places))
        has_room = may_write or any(map(store.native.has_room, places))
        if not has_room or all(map(store.is_barred, places)):
            return list(make())
        watch = DrawWatch(self.cached_dataset)
        samples = list(make())
        if watch.has_own_moved() or (watch.has_global_moved() and not are_others_drawing()):
            self._bar(places)
        elif watch.has_global_moved():
            if store.count(Count.UNCERTAIN, len(places)) < _UNCERTAIN_MAX:
                return samples
            self._warn_once(Count.RANDOM_WARN, _THREADS_DREW)
        else:
            self._store_all(places, tags, samples, make)
        return samples

    def _store_all(
        self, places: list[int], tags: list[int], samples: list[Any], make: Callable[[], Any]
    ) -> None:
        encoded = [self._encoded(*pair) for pair in zip(places, samples, strict=True)]
        number = self._store.count(Count.MADE, len(places))
        last = number + len(places) - 1
        if number < _COMPARED_FIRST or number // _COMPARED_EVERY != last // _COMPARED_EVERY:
            self._store.count(Count.COMPARED, len(places))
            if (differing := self._differing(places, encoded, make)) is not None:
                self._store.native.bar_all()
                if self._disk is not None:
                    self._disk.clear()
                self._warn_once(Count.RANDOM_WARN, _DIFFERS, index=differing)
                return
        for place, tag, sample in zip(places, tags, encoded, strict=True):
            self._store.native.put(place, tag, sample)
            if self._may_write_disk and self._store.native.keeps(place):
                self._put_on_disk(place, tag, sample)
        if self._store.native.is_exhausted:
            self._warn_once(Count.MEMORY_WARN, _NO_MEMORY)

    def _encoded(self, place: int, sample: Any) -> _C.StorableSample:
        try:
            return _C.StorableSample(sample, dumps_stored)
        except Exception as error:
            raise TypeError(
                f"samples of a cached dataset must be picklable and on the CPU, got one at {place} "
                f"of {self._name} that is not: {error}; place penstock.cached() where samples are "
                f"plain data"
            ) from error

    def _differing(
        self, places: list[int], encoded: list[_C.StorableSample], make: Callable[[], Any]
    ) -> int | None:
        """Make samples again. Return the index of the first one that differs, if any."""
        try:
            again = [self._encoded(*pair) for pair in zip(places, make(), strict=True)]
        except Exception:  # the first making raised none
            return places[0]
        pairs = zip(places, encoded, again, strict=True)
        return next((place for place, one, other in pairs if not one.is_same(other)), None)

    def _put_on_disk(self, place: int, tag: int, sample: _C.StorableSample) -> None:
        assert self._disk is not None
        data = sample.to_bytes(place, tag)
        try:
            is_stored = self._disk.put(place, data)
            if is_stored:
                self._store.count(Count.DISK_ENTRY)
                self._store.count(Count.DISK_ENTRY_BYTES, len(data))
                return
            self._store.count(Count.DISK_FULL)
            if self._disk.is_out_of_space():
                self._warn_once(Count.DISK_WARN, _DISK_FULL)
        except (sqlite3.Error, OSError) as error:
            self._give_up_disk(error)

    def _give_up_disk(self, error: Exception) -> None:
        assert self._disk is not None
        self._disk.stop()
        self._warn_once(Count.DISK_WARN, _DISK_FAILED, error=error)

    def _bar(self, places: list[int]) -> None:
        for place in places:
            self._store.native.bar(place)
        self._warn_once(Count.RANDOM_WARN, _DREW, index=places[0])

    def _warn_once(self, kind: _C.StoreCount, text: str, **values: Any) -> None:
        """Warn, unless one of the processes has done so."""
        if self._store.count(kind) == 0:
            folder = self._folder and str(self._folder.path)
            warn(text.format(name=self._name, folder=folder, **values))

    @property
    def _may_write_disk(self) -> bool:
        """Whether the disk has had room for every sample so far, in all processes."""
        may_write = self._disk is not None and self._disk.is_usable
        return may_write and self._store.counted(Count.DISK_FULL) == 0

    @property
    def _name(self) -> str:
        return type(self.cached_dataset).__name__


class _CachedBatches(CachedDataset[_T]):
    """The same of a dataset that fetches whole batches."""

    def __getitems__(self, indices: Sequence[Any]) -> list[_T]:
        places = [self._place_of(index) for index in indices]
        if None in places:
            return list(self.cached_dataset.__getitems__(indices))
        tags = [self._tag_of(place) for place in places if place is not None]
        found = [self._look_up(place, tag) for place, tag in zip(places, tags, strict=True)]  # type: ignore[arg-type]
        missing = [number for number, sample in enumerate(found) if sample is MISSING]
        if missing:
            wanted: list[Any] = [places[number] for number in missing]
            fetch = self.cached_dataset.__getitems__
            made = self._made(wanted, [tags[number] for number in missing], lambda: fetch(wanted))
            for number, sample in zip(missing, made, strict=True):
                found[number] = sample
        return found


_DREW = (
    "Sample {index} of {name} drew random numbers while it was made, so samples like it are not "
    "cached: they would be the same in each epoch. Place penstock.cached() before random "
    "augmentation, such as Augmented(penstock.cached(Decoded(paths), memory=...))"
)
_DIFFERS = (
    "Sample {index} of {name} was made twice with different values, so the dataset is not cached "
    "from now on: its samples would be the same in each epoch. Place penstock.cached() where "
    "samples do not change"
)
_THREADS_DREW = (
    "Samples of {name} are not cached while other threads draw from the global generators, because "
    "the draws may be theirs. Read the first epoch with fetch_threads=1, or take random numbers "
    "from the argument `generator` of __getitem__()"
)
_NO_MEMORY = (
    "The system has no memory left for the cache of {name}, which keeps what it has and takes no "
    "more; lower memory= of penstock.cached()"
)
_DISK_FULL = (
    "The disk of {folder} is full, so the cache of {name} takes no more samples there; free space "
    "or lower the budget in disk= of penstock.cached()"
)
_DISK_STALE = (
    "Sample {index} of {name} differs from the one that an earlier run has stored in {folder}, so "
    "the stored samples of this dataset were deleted and are made again. Pass another version= to "
    "penstock.cached() when code that makes samples changes"
)
_DISK_FAILED = (
    "The cache of {name} in {folder} is no longer used in this process, and samples are made "
    "instead: {error}. If the file is damaged, delete the folder"
)


def _check(dataset: Any) -> None:
    is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not is_map:
        raise ValueError(
            f"dataset must be map-style, with __getitem__() and __len__(), got "
            f"{type(dataset).__name__}; cache the samples of an iterable dataset in its __iter__()"
        )
    if accepts_generator(dataset):
        raise ValueError(
            f"dataset must return the same samples in each epoch, got {type(dataset).__name__}, "
            f"whose __getitem__() takes a generator for random numbers; cache the part of it that "
            f"comes before"
        )


def _folder_of(disk: Any, dataset: Any, version: str | None) -> _Folder:
    if isinstance(disk, str):
        path, _, size = disk.rpartition(":")
    elif isinstance(disk, tuple) and len(disk) == 2:
        path, size = disk
    else:
        path, size = "", None
    if not path or not isinstance(path, (str, os.PathLike)):
        raise ValueError(
            f'disk must be a folder and a budget, such as "/nvme/cache:500GB" or a tuple of both, '
            f"got {disk!r}; pass both"
        )
    budget_bytes = checked_bytes("the budget in disk", size)
    if version is not None and not isinstance(version, str):
        raise ValueError(f"version must be a text or None, got {version!r}; pass a text")
    content = dataset_fingerprint(dataset)
    if content is None and version is None:
        raise ValueError(
            f"version must be given to keep samples of {type(dataset).__name__} on disk, because "
            f"penstock cannot identify its content; pass a text that you change with the content, "
            f"or give the dataset an attribute `fingerprint`"
        )
    # Pickles in samples depend on the versions of the packages that read them.
    software = [__version__, torch.__version__, np.__version__, sys.version_info[:2]]
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    facts = json.dumps([content, version, kind, len(dataset), software])
    key = hashlib.sha256(facts.encode()).hexdigest()[:32]
    return _Folder(Path(path), budget_bytes, key)
