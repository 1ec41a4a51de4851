# SPDX-License-Identifier: Apache-2.0
"""A batch belongs to its holder: kept, changed, saved, grown or inherited by a child."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sample_datasets import Computed, as_is
from stream_oracle import without_frames
from torch.utils.data import TensorDataset, default_collate

BATCHES = 24


def row(size: int, index: int) -> torch.Tensor:
    return torch.full((size,), float(index))


def mixed(index: int) -> dict[str, Any]:
    return {
        "image": row(4096, index),
        "label": index,
        "name": f"sample {index}",
        "array": np.full(100, index),
        "mask": torch.full((3,), index % 2 == 0),
    }


def is_whole(batch: torch.Tensor, first: int) -> bool:
    expected = torch.arange(first, first + len(batch), dtype=batch.dtype)
    return bool((batch == expected.reshape(-1, *[1] * (batch.dim() - 1))).all())


@pytest.mark.parametrize("size", [1, 1000, 100_000])
@pytest.mark.parametrize("workers", [1, 2])
def test_kept_batches_do_not_change(loader_class: type, workers: int, size: int) -> None:
    loader = loader_class(
        Computed(2 * BATCHES, partial(row, size)), batch_size=2, num_workers=workers
    )
    batches = list(loader)
    del loader
    assert len(batches) == BATCHES
    assert all(is_whole(batch, 2 * number) for number, batch in enumerate(batches))


def test_nested_batches_kept_over_epochs_do_not_change(loader_class: type) -> None:
    loader = loader_class(Computed(12, mixed), batch_size=3, num_workers=2, persistent_workers=True)
    epochs = [list(loader) for _ in range(5)]
    del loader
    for batches in epochs:
        for number, batch in enumerate(batches):
            for key in ("image", "label", "array"):
                assert is_whole(batch[key], 3 * number)
            assert batch["name"] == [f"sample {3 * number + place}" for place in range(3)]
            assert batch["mask"][:, 0].tolist() == [
                (3 * number + place) % 2 == 0 for place in range(3)
            ]


def test_kept_part_outlives_the_rest_of_its_batch(loader_class: type) -> None:
    loader = loader_class(
        Computed(120, mixed), batch_size=2, num_workers=2, persistent_workers=True
    )
    kept = [batch["label"] for _ in range(3) for batch in loader]
    kept_rows = [batch["image"][1] for batch in loader]
    del loader
    assert [label.tolist() for label in kept] == [[2 * k, 2 * k + 1] for k in range(60)] * 3
    assert all(bool((part == 2 * k + 1).all()) for k, part in enumerate(kept_rows))


@pytest.mark.parametrize("persistent", [False, True])
def test_in_place_change_of_a_batch_affects_no_other(loader_class: type, persistent: bool) -> None:
    loader = loader_class(
        Computed(2 * BATCHES, partial(row, 3000)),
        batch_size=2,
        num_workers=2,
        prefetch_factor=4,
        persistent_workers=persistent,
    )
    for _ in range(3):
        for number, batch in enumerate(loader):
            assert is_whole(batch, 2 * number)
            batch.fill_(-1.0)


def test_in_place_change_of_a_kept_batch_persists(loader_class: type) -> None:
    loader = loader_class(Computed(40, partial(row, 3000)), batch_size=2, num_workers=2)
    kept = [batch.neg_() for batch in loader]
    assert all(is_whole(-batch, 2 * number) for number, batch in enumerate(kept))


def test_batches_of_varying_size_arrive_intact(loader_class: type) -> None:
    sizes = [1, 300_000, 2, 70_000, 1_500_000, 5, 0, 3_000_000, 4097, 1]
    loader = loader_class(
        Computed(3 * len(sizes), lambda index: row(sizes[index % len(sizes)], index)),
        batch_size=None,
        num_workers=2,
    )
    for number, batch in enumerate(loader):
        assert batch.shape == (sizes[number % len(sizes)],)
        assert bool((batch == number).all())


def test_growing_batches_arrive_intact_while_kept(
    loader_class: type,
) -> None:
    loader = loader_class(
        Computed(8, lambda index: row(1 << (10 + 2 * index), index)),
        batch_size=None,
        num_workers=1,
        prefetch_factor=1,
    )
    batches = list(loader)
    assert all(bool((batch == number).all()) for number, batch in enumerate(batches))


COLLATED: dict[str, Callable[[int], Any]] = {
    "floats": partial(row, 1000),
    "bytes": lambda index: torch.full((77,), index, dtype=torch.uint8),
    "numbers": int,
    "arrays": lambda index: np.full((3, 5), index),
}


@pytest.mark.parametrize("kind", COLLATED)
def test_batch_tensor_storage_has_exactly_its_bytes(loader_class: type, kind: str) -> None:
    for batch in loader_class(Computed(6, COLLATED[kind]), batch_size=3, num_workers=1):
        assert batch.untyped_storage().nbytes() == batch.numel() * batch.itemsize
        assert batch.storage_offset() == 0


def test_tensors_of_one_batch_have_separate_storages(loader_class: type) -> None:
    (batch,) = list(loader_class(Computed(4, mixed), batch_size=4, num_workers=1))
    storages = {
        part.untyped_storage().data_ptr() for part in batch.values() if torch.is_tensor(part)
    }
    assert len(storages) == 4


def test_saving_one_tensor_of_a_batch_saves_only_that_tensor(loader_class: type) -> None:
    (batch,) = list(loader_class(Computed(64, mixed), batch_size=64, num_workers=1))
    content = io.BytesIO()
    torch.save(batch["label"], content)
    assert len(content.getvalue()) < 4096
    content.seek(0)
    assert torch.load(content).tolist() == list(range(64))


def test_batch_tensor_cannot_grow_beyond_its_storage(loader_class: type) -> None:
    (batch,) = list(loader_class(Computed(4, partial(row, 5)), batch_size=4, num_workers=1))
    with pytest.raises(RuntimeError, match="not resizable"):
        batch.resize_(100)
    shrunk = batch.resize_(4, 2)
    assert shrunk.shape == (4, 2)


def test_batch_tensor_is_a_leaf_usable_by_autograd(loader_class: type) -> None:
    for batch in loader_class(Computed(4, partial(row, 5)), batch_size=2, num_workers=1):
        assert (batch.is_leaf, batch.requires_grad) == (True, False)
        assert not batch.is_inference()
        weight = torch.ones(5, requires_grad=True)
        (batch * weight).sum().backward()
        assert torch.equal(weight.grad, batch.sum(0))
        batch.requires_grad_().sum().backward()
        assert batch.grad is not None


def test_batches_are_aligned_for_vector_instructions(loader_class: type) -> None:
    dataset = Computed(30, lambda index: [torch.ones(k) for k in range(1, 8)])
    for batch in loader_class(dataset, batch_size=3, num_workers=2):
        assert all(part.data_ptr() % 16 == 0 for part in batch)


def test_kept_batch_outlives_its_killed_worker(loader_class: type) -> None:
    iterator = iter(
        loader_class(Computed(100, partial(row, 50_000)), num_workers=1, prefetch_factor=1)
    )
    batch = next(iterator)
    (worker,) = iterator._workers
    worker.kill()
    worker.join()
    try:
        while True:
            next(iterator)
    except RuntimeError as error:
        without_frames(error)
    del iterator
    assert is_whole(batch, 0)
    batch.add_(1)


class Keeper:
    """A collate_fn that keeps its earlier results, as caching datasets do."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, samples: list[Any]) -> Any:
        batch = default_collate(samples)
        self.made.append(batch)
        return (batch, [float(old.sum()) for old in self.made])


def test_batches_kept_in_the_worker_are_not_overwritten(loader_class: type) -> None:
    loader = loader_class(
        Computed(200, partial(row, 1000)), batch_size=4, num_workers=1, collate_fn=Keeper()
    )
    expected: list[float] = []
    for number, (batch, sums) in enumerate(loader):
        expected.append(1000.0 * sum(range(4 * number, 4 * number + 4)))
        assert sums == expected
        assert is_whole(batch, 4 * number)
        del batch


class Rolling:
    """A collate_fn that sends each batch a second time, with the next."""

    def __init__(self) -> None:
        self.previous: Any = None

    def __call__(self, samples: list[Any]) -> Any:
        batch = default_collate(samples)
        previous, self.previous = self.previous, batch
        return [batch, batch if previous is None else previous]


def test_batch_sent_twice_by_a_worker_is_intact_both_times(loader_class: type) -> None:
    loader = loader_class(
        Computed(200, partial(row, 1000)), batch_size=4, num_workers=1, collate_fn=Rolling()
    )
    for number, (batch, previous) in enumerate(loader):
        assert is_whole(batch, 4 * number)
        assert is_whole(previous, 4 * max(number - 1, 0))


def test_cached_samples_are_not_changed_through_their_batch(loader_class: type) -> None:
    """The trainer changes each batch; the dataset's cached rows must not change with it."""
    rows = [row(500, index) for index in range(8)]
    loader = loader_class(
        Computed(8, rows.__getitem__), batch_size=2, num_workers=1, persistent_workers=True
    )
    for _ in range(3):
        for number, batch in enumerate(loader):
            assert is_whole(batch, 2 * number)
            batch.zero_()


@pytest.mark.parametrize("who_lets_go", ["child", "parent", "nobody"])
def test_batch_inherited_by_a_forked_child_is_intact_in_both(
    loader_class: type, who_lets_go: str
) -> None:
    """The parent's objects at the fork are right in both, regardless of who releases them first."""
    loader = loader_class(
        Computed(80, partial(row, 2000)), batch_size=2, num_workers=2, persistent_workers=True
    )
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(4)]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            right = all(is_whole(batch, 2 * number) for number, batch in enumerate(kept))
            if who_lets_go == "child":
                kept.clear()
            os.read(reader, 1)
            right = right and all(is_whole(b, 2 * number) for number, b in enumerate(kept))
            os._exit(0 if right else 1)
        finally:
            os._exit(2)
    if who_lets_go == "parent":
        kept.clear()
    rest = list(iterator)
    again = list(loader)
    os.write(writer, b"!")
    _, status = os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert os.waitstatus_to_exitcode(status) == 0
    assert all(is_whole(batch, 2 * number) for number, batch in enumerate(kept))
    assert all(is_whole(batch, 2 * number + 8) for number, batch in enumerate(rest))
    assert all(is_whole(batch, 2 * number) for number, batch in enumerate(again))


def test_kept_batches_survive_forks_of_another_loader(
    loader_class: type,
) -> None:
    first = iter(loader_class(Computed(60, partial(row, 2000)), batch_size=2, num_workers=1))
    kept = [next(first) for _ in range(3)]
    for _ in range(2):
        others = list(loader_class(Computed(20, partial(row, 9)), batch_size=2, num_workers=2))
        assert all(is_whole(batch, 2 * number) for number, batch in enumerate(others))
        kept.append(next(first))
    kept.extend(first)
    assert len(kept) == 30
    assert all(is_whole(batch, 2 * number) for number, batch in enumerate(kept))


def test_batch_can_be_sent_to_another_process(loader_class: type) -> None:
    """Through torch.multiprocessing, as Hogwild trainers do."""
    (batch,) = list(loader_class(Computed(4, partial(row, 50)), batch_size=4, num_workers=1))
    queue = torch.multiprocessing.SimpleQueue()
    answers = torch.multiprocessing.SimpleQueue()

    def look() -> None:
        answers.put(is_whole(queue.get(), 0))

    process = torch.multiprocessing.get_context("fork").Process(target=look)
    process.start()
    queue.put(batch)
    assert answers.get() is True
    process.join()


def test_tensor_dataset_rows_survive_in_place_changes_of_batches(loader_class: type) -> None:
    rows = torch.arange(40.0).view(20, 2)
    for _ in range(2):
        batches = list(loader_class(TensorDataset(rows), batch_size=4, num_workers=2))
        for number, (batch,) in enumerate(batches):
            assert torch.equal(batch, rows[4 * number : 4 * number + 4])
            batch.zero_()


def test_numpy_views_of_a_batch_keep_it_alive(loader_class: type) -> None:
    loader = loader_class(Computed(300, partial(row, 1000)), batch_size=2, num_workers=2)
    views = [batch.numpy() for batch in loader]
    del loader
    assert all((view[0] == 2 * number).all() for number, view in enumerate(views))


def test_kept_arrays_do_not_change_and_are_writable(loader_class: type) -> None:
    loader = loader_class(
        Computed(100, lambda index: np.full(3000, index)),
        batch_size=None,
        num_workers=2,
        collate_fn=as_is,
    )
    arrays = list(loader)
    del loader
    for number, array in enumerate(arrays):
        assert (array == number).all()
        array += 1
