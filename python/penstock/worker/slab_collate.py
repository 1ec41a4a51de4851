# SPDX-License-Identifier: Apache-2.0
"""Has torch's collate functions write a worker's batches where they leave from: into the slab."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Protocol

import torch

from penstock import _C
from penstock.compat.iterators import torch_collate
from penstock.compat.storages import new_shared, replace_new_shared
from penstock.stream.table_rows import is_collate_map_untouched
from penstock.worker.fetching import FetchSpec
from penstock.worker.row_fetcher import SampleRows


class SlabServer(Protocol):
    """The part of a worker's native server that has the slab of the batch being made."""

    def collate(self, samples: list[Any], default_collate: Any) -> Any: ...

    def sample_rows(self) -> SampleRows: ...

    def fetch_clock(self) -> _C.FetchClock: ...

    def new_bytes(self, bytes: int) -> torch.Tensor | None: ...


def collating_into(server: SlabServer, fetch: FetchSpec) -> FetchSpec:
    """``fetch`` with the native default_collate in the place of torch's, and with samples that are
    copied into the batch one by one.
    """
    fetch = replace(fetch, clock=server.fetch_clock())
    if fetch.auto_collation and fetch.collate_fn is torch_collate.default_collate:
        return replace(fetch, collate_fn=_SlabCollate(server), rows=server.sample_rows())
    return fetch


class _SlabCollate:
    """default_collate into the slab; torch's own where the user has changed torch's registry, or
    has torch make tensors on another device.
    """

    draws_nothing = True

    def __init__(self, server: SlabServer) -> None:
        self._server = server

    def __call__(self, samples: Any) -> Any:
        if (
            type(samples) is not list
            or not is_collate_map_untouched()
            or torch.get_default_device().type != "cpu"
        ):
            return torch_collate.default_collate(samples)
        return self._server.collate(samples, torch_collate.default_collate)


def lend_slabs_to_torch(server: SlabServer) -> None:
    """Makes torch's collate functions write into the slab.

    Inside a worker, torch's default_collate asks for a fresh shared storage for each tensor, whose
    pages the kernel must first clear: most of the cost of a large batch. Here the storage lies in
    the slab of the batch being made, so a collate_fn that calls default_collate gains as the plain
    one does. Other uses of shared storages are untouched.
    """
    owner_pid = os.getpid()
    shared_by_torch = new_shared()

    def _in_the_slab(cls: Any, size: int, *, device: Any = "cpu") -> Any:
        if torch.device(device).type == "cpu" and os.getpid() == owner_pid:
            block = server.new_bytes(size)
            # Without room in the slab, private memory: it is copied into a larger slab with what
            # else the batch has. Shared memory would be handed over as it is, and the kernel would
            # clear its pages for every batch anew.
            return torch.UntypedStorage(size) if block is None else block.untyped_storage()
        return shared_by_torch(size, device=device)

    replace_new_shared(_in_the_slab)
