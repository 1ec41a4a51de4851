# SPDX-License-Identifier: Apache-2.0
"""A tensor that the dataset keeps in shared memory is not copied: both sides share its memory."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest
import torch
from sample_datasets import as_is
from stream_oracle import error_of
from torch.utils.data import Dataset, IterableDataset

SIZE = 100_000


class Kept(Dataset[Any]):
    """Returns tensors in shared memory, or parts of them, as they are."""

    def __init__(self, count: int = 3, length: int = 12) -> None:
        self.tensors = [torch.full((SIZE,), float(index)).share_memory_() for index in range(count)]
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.tensors[index % len(self.tensors)]


class Parts(Kept):
    def __getitem__(self, index: int) -> Any:
        tensor = self.tensors[0]
        return {
            "whole": tensor,
            "part": tensor[10:20],
            "own": torch.ones(SIZE),
            "t": tensor.view(100, -1).t(),
        }


class Echo(Kept):
    """Returns the contents of its memory after it has given it."""

    def __getitem__(self, index: int) -> Any:
        return self.tensors[0], self.tensors[0][0].item()


class Mortal(Kept):
    """Kills its worker, once the trainer has taken the earlier batches: torch's loader gets their
    descriptors from the worker itself, and has another error if the worker is gone by then."""

    def __init__(self, gate: int) -> None:
        super().__init__(length=20)
        self.gate = gate

    def __getitem__(self, index: int) -> Any:
        if index == 12:
            os.read(self.gate, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Fresh(IterableDataset[Any]):
    """Shares each tensor again and keeps none."""

    def __iter__(self) -> Any:
        return (torch.full((SIZE,), float(index)).share_memory_() for index in range(200))


def loader_of(loader_class: type, dataset: Any, **options: Any) -> Any:
    return loader_class(dataset, batch_size=None, num_workers=1, **options)


@pytest.mark.long("penstock-forkserver")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_shared_tensor_is_the_memory_of_the_dataset(loader_class: type, method: str) -> None:
    dataset = Kept(length=6)
    for index, tensor in enumerate(
        loader_of(loader_class, dataset, multiprocessing_context=method)
    ):
        assert tensor.is_shared()
        assert bool((tensor == index % 3 + (50 if index >= 3 else 0)).all())
        tensor.fill_(50 + index % 3)
        assert dataset.tensors[index % 3][-1].item() == 50 + index % 3


def test_live_batches_of_one_tensor_are_one_storage(loader_class: type) -> None:
    batches = list(loader_of(loader_class, Kept(count=1, length=5)))
    assert len({batch.untyped_storage().data_ptr() for batch in batches}) == 1
    assert len({batch.untyped_storage()._cdata for batch in batches}) == 1


@pytest.mark.long
def test_batch_after_spawn_is_the_storage_shared_by_the_trainer(loader_class: type) -> None:
    dataset = Kept(count=1, length=2)
    for batch in loader_of(loader_class, dataset, multiprocessing_context="spawn"):
        assert batch.data_ptr() == dataset.tensors[0].data_ptr()


def test_only_parts_of_one_tensor_share_its_memory(loader_class: type) -> None:
    dataset = Parts(count=1, length=3)
    for batch in loader_of(loader_class, dataset):
        whole, part = batch["whole"], batch["part"]
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert part.storage_offset() == 10 and part.untyped_storage().nbytes() == 4 * SIZE
        assert batch["t"].stride() == (1, SIZE // 100)
        part.add_(1)
        assert bool((whole[10:20] == dataset.tensors[0][10]).all())
        assert bool((batch["own"] == 1).all())


def test_worker_sees_writes_of_the_trainer(loader_class: type) -> None:
    dataset = Echo(count=1, length=20)
    seen = []
    for step, (tensor, first) in enumerate(loader_of(loader_class, dataset)):
        seen.append(first)
        tensor[0] = float(step + 1)
    assert seen[0] == 0.0 and seen[-1] > 0.0


def test_shared_tensors_outlive_the_loader_and_the_dataset(loader_class: type) -> None:
    loader = loader_of(loader_class, Kept())
    batches = list(loader)
    del loader
    gc.collect()
    assert [batch[-1].item() for batch in batches] == [float(index % 3) for index in range(12)]
    again = batches[0].clone()
    assert torch.equal(again, batches[3])


@pytest.mark.torch_may_leave(
    "torch's error comes out of a signal handler, in the middle of whatever its queues are doing"
)
def test_shared_tensors_survive_the_death_of_their_worker(loader_class: type) -> None:
    reader, writer = os.pipe()
    iterator = iter(loader_of(loader_class, Mortal(reader)))
    kept = [next(iterator) for _ in range(12)]
    os.write(writer, b"!")
    error = error_of(lambda: next(iterator))
    os.close(reader)
    os.close(writer)
    # Until the iterator has ended, torch's handler of SIGCHLD raises again for any child that ends.
    iterator._shutdown_workers()
    assert isinstance(error, RuntimeError)
    assert [tensor[0].item() for tensor in kept] == 4 * [0.0, 1.0, 2.0]


def test_repeatedly_shared_tensors_leave_no_descriptors(loader_class: type) -> None:
    counts = []
    for index, batch in enumerate(loader_of(loader_class, Fresh(), prefetch_factor=2)):
        assert batch[0].item() == index
        del batch
        counts.append(len(os.listdir("/proc/self/fd")))
    assert max(counts[10:]) <= min(counts[10:]) + 10


def test_batch_of_shared_samples_is_collated_into_new_memory(loader_class: type) -> None:
    dataset = Kept(count=2, length=4)
    for batch in loader_class(dataset, batch_size=2, num_workers=1):
        batch.fill_(-1)
    assert [tensor[0].item() for tensor in dataset.tensors] == [0.0, 1.0]


def test_shared_tensors_in_a_pickled_batch_are_shared(loader_class: type) -> None:
    dataset = Kept(count=1, length=2)
    for batch in loader_class(dataset, batch_size=1, num_workers=1, collate_fn=as_is):
        assert batch[0].is_shared()
        batch[0][5] = 9.0
        assert dataset.tensors[0][5].item() == 9.0
