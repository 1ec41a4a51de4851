# SPDX-License-Identifier: Apache-2.0
"""Jobs of C++ trainers: JSON in place of a pickle, which names a dataset factory.

``csrc/dataset/job_text.cpp`` writes the text, at the place of the header in a Python job. The
worker imports the factory's module as any local program would; no code of the trainer runs.
"""

from __future__ import annotations

import io
import json
import os
import socket
import struct
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate, default_convert

from penstock._version import __version__
from penstock.compat.iterators import DatasetKind
from penstock.pool.pool_job import Job, JobRefused
from penstock.worker.fetching import FetchSpec

_LENGTH = struct.Struct("<Q")
_TEXT_BYTES_MAX = 1 << 20


def is_of_cpp(blob: bytes) -> bool:
    """Return whether the blob is a job of a C++ trainer."""
    parts = _text_of(blob)
    return isinstance(parts, dict) and "kind" in parts


def open_factory_job(blob: bytes, get_blob: Callable[[bytes], bytes]) -> Job:
    """Create the dataset that the job names. Raise JobRefused if this is impossible here."""
    parts = _text_of(blob)
    worker = f"{socket.gethostname()}:{os.getpid()}"
    try:
        name, kind, made_with = parts["name"], parts["kind"], parts["made_with"]
        begin = f"the job {name!r} cannot run here"
        if kind != "factory":
            raise JobRefused(
                f"{begin}: its dataset is a plug-in, which penstock-worker loads; this worker "
                f"({worker}) runs Python; start penstock-worker for it"
            )
        _check_versions(made_with, begin, worker)
        transform_id = parts["transform"]
        collate = default_convert if parts["batch_size"] is None else default_collate
        if transform_id is not None:
            module = torch.jit.load(io.BytesIO(get_blob(bytes.fromhex(transform_id))))
            collate = _Transformed(collate, module)
        dataset = _make(parts["factory"], parts["arguments"], begin, worker)
        return Job(
            fetch=FetchSpec(
                dataset_kind=DatasetKind.Iterable
                if isinstance(dataset, IterableDataset)
                else DatasetKind.Map,
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
        raise JobRefused(
            f"a job cannot run here: this worker ({worker}) cannot read what it was sent "
            f"({type(error).__name__}: {error}) as a job; install the same version of penstock on "
            f"both"
        ) from error


def _text_of(blob: bytes) -> Any:
    """Return the JSON at the end of a blob, or None if there is none."""
    end = len(blob) - _LENGTH.size
    if end < 0:
        return None
    (byte_count,) = _LENGTH.unpack_from(blob, end)
    if byte_count > min(_TEXT_BYTES_MAX, end):
        return None
    try:
        return json.loads(blob[end - byte_count : end])
    except (ValueError, RecursionError):
        return None


def _check_versions(made_with: dict[str, str], begin: str, worker: str) -> None:
    torch_here = ".".join(torch.__version__.split(".")[:2])
    for name, theirs, ours in (
        ("penstock", made_with["penstock"], __version__),
        ("torch", made_with["torch"], torch_here),
    ):
        if theirs != ours:
            raise JobRefused(
                f"{begin}: it was made with {name} {theirs} and this worker ({worker}) has {name} "
                f"{ours}; install the same version on both"
            )


def _make(factory: str, arguments: Any, begin: str, worker: str) -> Any:
    module_name, colon, function_name = factory.partition(":")
    if not colon or not module_name or not function_name:
        raise JobRefused(
            f"{begin}: its factory is {factory!r}; 'module:function' is expected, such as "
            f"'my_package.datasets:photographs'"
        )
    try:
        function = import_module(module_name)
        for part in function_name.split("."):
            function = getattr(function, part)
        made = function(**({} if arguments is None else arguments))  # type: ignore[operator]
        return made
    except BaseException as error:  # the user's modules may raise anything
        raise JobRefused(
            f"{begin}: on this worker ({worker}, working directory {os.getcwd()}), the factory "
            f"{factory} failed with {type(error).__name__}: {error}; its module has to be "
            f"importable there, and what it names has to be there"
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
