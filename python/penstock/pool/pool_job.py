# SPDX-License-Identifier: Apache-2.0
"""A job: all that a trainer sends to pool workers so that they can make its batches.

A job's blob is a cloudpickle pickle, a JSON header, and the length of the header (u64,
little-endian). The header names the versions that the job was made with, and is checked before
anything is unpickled. The user's modules are separate blobs, which the header names. A blob's id is
its SHA-256, so the same job has the same id in the next epoch and in a run that resumes;
job_pickle.py keeps random parts out of the pickle for that.

Each epoch uses the dataset as it is at the start of the epoch, as torch's new workers do. If an
inspection of its data shows that it has not changed, the previous hash of its pickle is used again
(`PickleCache`). Otherwise, :func:`job_id` pickles it again and keeps only the hash; the header is
at the end of the blob for that reason.

Unpickling a job runs the trainer's code: only workers do it, and only for a trainer whose key the
pool accepts. The job of a C++ trainer has no pickle: it names the dataset.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, default_collate, default_convert

from penstock.compat.iterators import DatasetKind
from penstock.errors import PenstockError, UnsupportedError
from penstock.pool.job_code import PackedCode, extract_code, put_first_in_path
from penstock.pool.job_pickle import PickleCache, find_unpicklable, pickle_into
from penstock.pool.job_versions import Versions, imports_of, installed_version, reason_to_refuse
from penstock.pool.process_settings import JobSettings
from penstock.pool.worker_errors import place_of_process
from penstock.worker.fetching import FetchSpec

_LENGTH = struct.Struct("<Q")
_HEADER_BYTES_MAX = 1 << 20


class JobRefused(PenstockError):
    """This worker cannot run a job; the message is for the trainer's user."""

    code = "job-refused"


@dataclass(frozen=True, slots=True)
class Job:
    fetch: FetchSpec
    init_fn: Callable[[int], None] | None
    shard_count: int
    trust_workers: bool
    name: str  # its name for people
    settings: JobSettings = field(default_factory=JobSettings)  # of the trainer's process
    may_be_kept: bool = True  # its batches, for requests of the same name
    code_folders: tuple[str, ...] = ()  # at a worker: the folders with its modules
    is_of_cpp: bool = False  # at a worker: its trainer requests a description of the dataset


class PackedJob(NamedTuple):
    id: bytes
    blobs: dict[bytes, bytes]  # by their ids; ``blobs[id]`` is the job itself


@dataclass(frozen=True, slots=True)
class _Header:
    name: str
    shard_count: int
    trust_workers: bool
    may_be_kept: bool
    code: list[dict[str, str]]  # "name", for people, and "id" of the blob, in hex
    made_with: Versions
    modules: dict[str, str]  # modules of no package, with the trainer's folder to import each from
    settings: dict[str, Any]


def pack_job(job: Job, code: Sequence[PackedCode], known: PickleCache | None = None) -> PackedJob:
    """Pickle ``job``, with copies of all data that its dataset holds.

    Raise PicklingError, which names the object that cannot be pickled.
    """
    chunks: list[Any] = []
    found = hashlib.sha256()
    known = known or PickleCache()
    known.recall(job.fetch, job.init_fn)
    modules = _pickle(job, found, [chunks.append], known)
    _write_header(job, code, modules, [found.update, chunks.append])
    blobs = {found.digest(): b"".join(chunks), **{each.id: each.data for each in code}}
    return PackedJob(found.digest(), blobs)


def job_id(job: Job, code: Sequence[PackedCode], known: PickleCache | None = None) -> bytes:
    """Return the id that :func:`pack_job` would give, without copying the data. Raise the same
    exceptions."""
    known = known or PickleCache()
    recalled = known.recall(job.fetch, job.init_fn)
    if recalled is None:
        found = hashlib.sha256()
        modules = _pickle(job, found, [], known)
    else:
        found, modules = recalled
    _write_header(job, code, modules, [found.update])
    return found.digest()


def unpack_job(blob: bytes, get_blob: Callable[[bytes], bytes], code_root: str) -> Job:
    """Unpack the job of a blob. From then on, its modules are imported from its own code.

    The trainer's settings also become the settings of this process. ``get_blob`` returns a blob by
    its id and may raise any exception. Modules are extracted under ``code_root``, a private folder
    of this user; it is created if needed, and the caller removes it. Raise JobRefused.
    """
    worker = f"{socket.gethostname()}:{os.getpid()}"
    header = _read_header(blob, worker)
    begin = f"the job {header.name!r} cannot run here"
    codes = [(each["id"], get_blob(bytes.fromhex(each["id"]))) for each in header.code]
    try:
        folders = tuple(extract_code(data, code_id, code_root) for code_id, data in codes)
    except (UnsupportedError, OSError) as error:
        raise JobRefused(f"{begin}: on this worker ({worker}), {error}") from error
    put_first_in_path(folders, code_root)
    settings = JobSettings.of_fields(header.settings)
    settings.apply()
    try:
        fetch, init_fn = pickle.loads(memoryview(blob)[: _header_span(blob).start])
    except BaseException as error:  # the user's modules and objects may raise anything
        raise JobRefused(
            f"{begin}: {_unpickling_failure(error, header, len(blob), worker)}"
        ) from error
    return Job(
        fetch,
        init_fn,
        header.shard_count,
        header.trust_workers,
        header.name,
        settings,
        header.may_be_kept,
        folders,
    )


def is_of_cpp(blob: bytes) -> bool:
    """Return whether the blob is a job of a C++ trainer: JSON, written by
    ``csrc/dataset/job_text.cpp``, at the place of the header, and no pickle. It names a dataset
    factory, whose module the worker imports as any local program would; no code of the trainer
    runs.
    """
    try:
        parts = json.loads(blob[_header_span(blob)])
    except (struct.error, ValueError, RecursionError):
        return False
    return isinstance(parts, dict) and "kind" in parts


def open_factory_job(blob: bytes, get_blob: Callable[[bytes], bytes]) -> Job:
    """Create the dataset that a C++ trainer's job names. Raise JobRefused if this is impossible
    here."""
    worker = f"{socket.gethostname()}:{os.getpid()}"
    try:
        parts = json.loads(blob[_header_span(blob)])
        name, here = parts["name"], Versions.here({})
        # A C++ program has no Python and no packages to compare.
        made_with = _versions_of({**parts["made_with"], "python": here.python, "packages": {}})
        begin = f"the job {name!r} cannot run here"
        if parts["kind"] != "factory":
            raise JobRefused(
                f"{begin}: its dataset is a plug-in, which penstock-worker loads; this worker "
                f"({worker}) runs Python; start penstock-worker for it"
            )
        if reason := reason_to_refuse(made_with, here, installed_version, worker):
            raise JobRefused(f"{begin}: {reason}")
        transform_id = parts["transform"]
        collate = default_convert if parts["batch_size"] is None else default_collate
        if transform_id is not None:
            module = torch.jit.load(io.BytesIO(get_blob(bytes.fromhex(transform_id))))
            collate = _Transformed(collate, module)
        dataset = _make(parts["factory"], parts["arguments"], begin, worker)
        is_iterable = isinstance(dataset, IterableDataset)
        return Job(
            fetch=FetchSpec(
                dataset_kind=DatasetKind.Iterable if is_iterable else DatasetKind.Map,
                dataset=dataset,
                auto_collation=parts["batch_size"] is not None,
                collate_fn=collate,
                drop_last=parts["drop_last"],
                fetch_threads=1,
            ),
            init_fn=None,
            shard_count=parts["shard_count"],
            trust_workers=False,
            name=name,
            is_of_cpp=True,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(worker, error) from error


def check_can_be_sent(fetch: FetchSpec, init_fn: Callable[[int], None] | None) -> None:
    """Raise PicklingError, naming the object, if an object cannot be pickled. Do not copy the
    data."""
    with _naming_unpicklable_part(fetch, init_fn):
        pickle_into(_Sink([]), (fetch, init_fn))


class _Sink:
    def __init__(self, takers: Sequence[Callable[[Any], object]]) -> None:
        self._takers = takers

    def write(self, data: Any, /) -> None:
        for take in self._takers:
            take(data)


def _pickle(
    job: Job, found: Any, takers: Sequence[Callable[[Any], object]], known: PickleCache
) -> set[str]:
    """Write the pickle of the job's objects in parts to ``found``, a hash, and to each of
    ``takers``. The large parts are the memory of the objects themselves, which takers must copy
    before the job changes. Return the modules that the pickle may import.
    """
    began_at = time.perf_counter()
    with _naming_unpicklable_part(job.fetch, job.init_fn):
        modules = pickle_into(_Sink([found.update, *takers]), (job.fetch, job.init_fn))
    known.note(found, modules, time.perf_counter() - began_at)
    return modules


def _write_header(
    job: Job,
    code: Sequence[PackedCode],
    modules: set[str],
    takers: Sequence[Callable[[Any], object]],
) -> None:
    """Write the rest of the job's blob to each of ``takers``."""
    sink = _Sink(takers)
    imports = imports_of(modules, sent=frozenset().union(*(each.paths for each in code)))
    header = _Header(
        name=job.name,
        shard_count=job.shard_count,
        trust_workers=job.trust_workers,
        may_be_kept=job.may_be_kept,
        code=[{"name": os.path.basename(each.root), "id": each.id.hex()} for each in code],
        made_with=Versions.here(imports.packages),
        modules=imports.modules,
        settings=asdict(job.settings),
    )
    text = json.dumps(asdict(header), sort_keys=True).encode()
    sink.write(text)
    sink.write(_LENGTH.pack(len(text)))


@contextmanager
def _naming_unpicklable_part(
    fetch: FetchSpec, init_fn: Callable[[int], None] | None
) -> Iterator[None]:
    """Name the rejected part of the loader in pickling errors."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # the user's classes may raise anything
        raise pickle.PicklingError(_pickling_failure(fetch, init_fn, error)) from error


def _pickling_failure(
    fetch: FetchSpec, init_fn: Callable[[int], None] | None, error: Exception
) -> str:
    found = find_unpicklable(
        {"dataset": fetch.dataset, "collate_fn": fetch.collate_fn, "worker_init_fn": init_fn}
    )
    what = "a part of it" if found is None else f"{found.path}, of type {_type_name(found.value)},"
    return (
        f"the loader of a {_type_name(fetch.dataset)} cannot be sent to the workers of a pool: "
        f"pickling {what} raised {type(error).__name__}: {error}; everything in dataset, "
        f"collate_fn and worker_init_fn must be picklable, so create or open this in "
        f"__getitem__, __iter__ or worker_init_fn, or leave it out in the class's __getstate__"
    )


def _type_name(value: Any) -> str:
    kind = type(value)
    is_plain = kind.__module__ in ("builtins", "__main__", "__mp_main__")
    return kind.__qualname__ if is_plain else f"{kind.__module__}.{kind.__qualname__}"


def _header_span(blob: bytes) -> slice:
    end = len(blob) - _LENGTH.size
    (byte_count,) = _LENGTH.unpack_from(blob, max(end, 0))
    if byte_count > min(_HEADER_BYTES_MAX, end):
        raise ValueError(f"its header would have {byte_count} bytes")
    return slice(end - byte_count, end)


def _read_header(blob: bytes, worker: str) -> _Header:
    """Parse the header. Raise JobRefused, also if this process lacks packages that it requires."""
    try:
        parts = json.loads(blob[_header_span(blob)])
        # First, because the other fields may be in the format of another version of penstock.
        name, made_with = parts["name"], _versions_of(parts["made_with"])
        here = Versions.here({})
        reason = reason_to_refuse(made_with, here, installed_version, worker)
        if reason is None:
            return _checked(_Header(**{**parts, "made_with": made_with}))
    except (struct.error, ValueError, TypeError, KeyError, RecursionError) as error:
        raise _unreadable(worker, error) from error
    raise JobRefused(f"the job {name!r} cannot run here: {reason}")


def _unreadable(worker: str, error: Exception) -> JobRefused:
    return JobRefused(
        f"a job cannot run here: this worker ({worker}) cannot read the job that it received "
        f"({type(error).__name__}: {error}); install the same version of penstock on both"
    )


def _versions_of(parts: Any) -> Versions:
    versions = Versions(**parts)
    texts = [versions.python, versions.torch, versions.penstock]
    if not _is_list_of_str(texts) or not _is_dict_of_str(versions.packages):
        raise TypeError("a version has the wrong type")
    return versions


def _checked(header: _Header) -> _Header:
    are_types_right = (
        type(header.name) is str
        and type(header.shard_count) is int
        and type(header.trust_workers) is bool
        and type(header.may_be_kept) is bool
        and type(header.code) is list
        and all(_is_dict_of_str(each) for each in header.code)
        and _is_dict_of_str(header.modules)
        and type(header.settings) is dict
    )
    if not are_types_right:
        raise TypeError("a field has the wrong type")
    if any(len(bytes.fromhex(each["id"])) != hashlib.sha256().digest_size for each in header.code):
        raise ValueError("the id of its code is not a SHA-256 digest")
    JobSettings.of_fields(header.settings)
    return header


def _is_list_of_str(value: Any) -> bool:
    return type(value) is list and all(type(item) is str for item in value)


def _is_dict_of_str(value: Any) -> bool:
    return type(value) is dict and _is_list_of_str([*value.keys(), *value.values()])


def _unpickling_failure(error: BaseException, header: _Header, byte_count: int, worker: str) -> str:
    """Describe an error that occurred during unpickling, and the remedy."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        top = error.name.partition(".")[0]
        folder = header.modules.get(top, f"the folder that has {top}")
        return (
            f"its dataset needs the module {error.name!r}, which this worker ({worker}) does not "
            f"have; pass pool=Pool(..., code_paths=[{folder!r}]) to the DataLoader, name that "
            f"folder in the trainer's PENSTOCK_CODE_PATHS, or install it on the worker"
        )
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, (AttributeError, ImportError)):
        return (
            f"its dataset needs another version of a module than this worker ({worker}) has "
            f"({said}); pass pool=Pool(..., code_paths=[...]) with the folder of that module "
            f"to the DataLoader, or install the same version on the worker"
        )
    if isinstance(error, MemoryError):
        return (
            f"this worker ({worker}) has no memory for its dataset, of {byte_count >> 20} MiB; "
            f"give the worker more memory, or let the dataset read its data instead of containing "
            f"it"
        )
    return (
        f"this worker ({place_of_process()}) could not unpickle its dataset ({said}); files and "
        f"devices that it names must exist on every worker"
    )


def _make(factory: str, arguments: Any, begin: str, worker: str) -> Any:
    module_name, colon, function_name = factory.partition(":")
    if not colon or not module_name or not function_name:
        raise JobRefused(
            f"{begin}: its factory must be 'module:function', such as "
            f"'my_package.datasets:photographs', got {factory!r}"
        )
    try:
        function = import_module(module_name)
        for part in function_name.split("."):
            function = getattr(function, part)
        return function(**({} if arguments is None else arguments))  # type: ignore[operator]
    except BaseException as error:  # the user's modules may raise anything
        raise JobRefused(
            f"{begin}: on this worker ({worker}, working directory {os.getcwd()}), the factory "
            f"{factory} failed with {type(error).__name__}: {error}; its module must be "
            f"importable there, and everything that it names must exist there"
        ) from error


class _Transformed:
    """A collate function followed by a scripted module, which takes the parts of the batch."""

    def __init__(self, collate: Callable[[Any], Any], module: Any) -> None:
        self._collate = collate
        self._module = module

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        with torch.no_grad(), torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            if isinstance(batch, dict):
                return self._module(**batch)
            if isinstance(batch, (list, tuple)):
                return self._module(*batch)
            return self._module(batch)
