# SPDX-License-Identifier: Apache-2.0
"""A loader whose only worker runs in this process: real executors on real batches, without
transport.

It keeps the contract between `penstock.DataLoader` and the cut: batches are recorded leaf by leaf,
and once a prefix is installed, batches fetched from then on carry its results by key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from penstock import _C
from penstock.graph.link import Library
from penstock.loader.loader_run import LoaderRun
from penstock.tracking.batch_origin import BatchHandle
from penstock.tracking.leaves import flatten_batch


class InProcessPool(LoaderRun):
    """Yields `batches` repeatedly, like a loader with one worker."""

    num_workers = 1
    pool = replica_group = None  # it has no remote workers

    def __init__(self, batches: Sequence[Any]) -> None:
        super().__init__()
        self.batches = list(batches)
        self.executors: dict[str, tuple[list[str], Any, int]] = {}
        self.shipped_count = 0
        self.corrupts_results = False  # change all boundary tensors slightly, like a faulty worker
        self.corrupted_operator: str | None = None  # only if the prefix ends in this operator
        self.delivered_count = 0
        self.epoch = 0
        self.withhold = False  # send no boundary tensors
        self.maker = 0  # the worker that makes the next batch

    @property
    def _run(self) -> LoaderRun:
        return self

    def install_prefix(
        self, prefix: str, constants: list[torch.Tensor], seed: int, library: Library
    ) -> None:
        assert not library.code
        super().install_prefix(prefix, constants, seed, library)
        copies = [constant.detach().clone() for constant in constants]
        graph = _C.parse_graph(prefix)
        executor = _C.Executor(graph, copies, allow_random=True)
        self.executors[prefix] = (graph.output_keys, executor, seed)

    def remove_prefixes(self, prefixes: set[str]) -> None:
        super().remove_prefixes(prefixes)
        self.executors = {text: self.executors[text] for text in self.prefixes}

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield self.deliver(batch)

    def deliver(self, batch: Any) -> Any:
        """Return a copy of `batch` as delivered to the trainer."""
        fresh = clone(batch)
        leaves = flatten_batch(fresh)
        sequence = self.delivered_count
        handle = BatchHandle(
            leaf_count=len(leaves),
            epoch=self.epoch,
            sequence=sequence,
            place=(0, sequence),
            maker=self.maker,
        )
        self.delivered_count += 1
        if not self.withhold:
            for keys, executor, seed in self.executors.values():
                seed = _C.seed_of_batch(seed, *handle.place)
                handle.boundary.update(self._execute(keys, executor, leaves, seed))
        if self.provenance is not None:
            self.provenance.record_batch(handle, leaves)
            if self.provenance.deferral is not None:
                return self.provenance.deferral.delivered(fresh, handle, leaves)
        return fresh

    def _execute(
        self, keys: list[str], executor: Any, leaves: list[torch.Tensor], seed: int
    ) -> dict[str, Any]:
        if executor.refusal(leaves) is not None:
            return {}
        results = [in_a_slab(result) for result in executor.run(leaves, seed)]
        self.shipped_count += len(results)
        for name, result in zip(executor.graph.output_names, results, strict=True):
            made = f"%{name} = {self.corrupted_operator}("
            if (
                self.corrupts_results
                or self.corrupted_operator is not None
                and made in str(executor.graph)
            ):
                flat = torch.empty(0, dtype=torch.uint8).set_(result.untyped_storage())
                # The last bit of a non-integer can be lost in rounding.
                byte = result.element_size() // 2 if result.is_floating_point() else 0
                flat[byte :: result.element_size()] ^= 1
        return dict(zip(keys, results, strict=True))


def clone(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, dict):
        return {key: clone(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)([clone(value) for value in batch])
    return batch


def in_a_slab(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values and strides, overlapping ones too, in separate memory; a slab cannot
    hold conjugate views."""
    tensor = tensor.resolve_conj().resolve_neg()
    copy = tensor.untyped_storage().clone()
    fresh = torch.empty(0, dtype=tensor.dtype)
    return fresh.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())
