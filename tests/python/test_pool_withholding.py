# SPDX-License-Identifier: Apache-2.0
"""Unread leaves stay with a pool's workers, and are correct when they are read."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_datasets import ForgetfulPictures, Pictures
from pool_processes import PoolProcesses, pool_of
from pool_training import (
    IMAGE_BYTES,
    MASK_BYTES,
    Shrinking,
    expected,
    first_withheld,
    is_withheld,
    loader_of,
    losses_of,
    plain_step,
)

import penstock
from penstock import DataLoader
from penstock.errors import PenstockError
from penstock.tracking.lazy_tensor import LazyTensor

pytestmark = pytest.mark.slow


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


@pytest.mark.long
def test_unread_leaves_are_not_sent(pool: PoolProcesses) -> None:
    pool.start_worker()  # one: the first batch of a late second one would be compared
    loader = loader_of(pool, Pictures(400))
    assert losses_of(loader, plain_step, is_offloaded=True) == expected(400, plain_step)
    stats = loader.stats()
    assert stats.recalled_batches == 0
    # The mask and the image, of most batches.
    assert stats.withheld_bytes > 50 * (IMAGE_BYTES + MASK_BYTES)
    assert stats.batch_bytes < stats.withheld_bytes


@pytest.mark.long
def test_leaf_read_by_the_program_is_sent(pool: PoolProcesses) -> None:
    def step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        target = batch["mask"].float().mean()
        return plain_step(model, batch) + target

    pool.start_worker()
    loader = loader_of(pool, Pictures(320))
    assert losses_of(loader, step, is_offloaded=True) == expected(320, step)
    stats = loader.stats()
    assert stats.recalled_batches == 0
    assert stats.withheld_bytes % IMAGE_BYTES == 0
    assert stats.withheld_bytes > 0


@pytest.mark.long
def test_rarely_read_leaf_is_fetched_correctly(pool: PoolProcesses) -> None:
    """Where its batch arrived without it; the start of that depends on how busy the machine is."""
    step_count = withheld_count = 0
    read_at: list[int] = []

    def step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        nonlocal step_count, withheld_count
        step_count += 1
        if is_withheld(batch["image"]):
            withheld_count += 1
            if withheld_count % 20 == 1:
                read_at.append(step_count)
        loss = plain_step(model, batch)
        if step_count in read_at:
            return loss + batch["image"].float().var() * 1e-3
        return loss

    pool.start_worker(processes=2)
    loader = loader_of(pool, Pictures(400))
    losses = losses_of(loader, step, is_offloaded=True)
    step_count = 0
    assert losses == expected(400, step)
    stats = loader.stats()
    assert stats.recalled_batches == len(read_at) > 0, (stats.recalled_batches, read_at)
    assert stats.withheld_bytes > 0


@pytest.mark.long
def test_often_fetched_leaf_is_sent_again(pool: PoolProcesses) -> None:
    count = 0

    def step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        nonlocal count
        count += 1
        loss = plain_step(model, batch)
        return loss + batch["image"].float().mean() if count > 60 else loss

    pool.start_worker(processes=2)
    loader = loader_of(pool, Pictures(480))
    losses = losses_of(loader, step, is_offloaded=True)
    count = 0
    assert losses == expected(480, step)
    stats = loader.stats()
    assert 2 <= stats.recalled_batches <= 12  # batches in flight meanwhile


@pytest.mark.long
def test_lazy_fetch_after_worker_death_uses_another_worker(pool: PoolProcesses) -> None:
    first = pool.start_worker()
    loader = loader_of(pool, Pictures(4000), shuffle=False)
    torch.manual_seed(3)
    model = penstock.offload(Shrinking(), loader, cut="maximal")
    iterator, batch = first_withheld(loader, model)
    number = batch["image"]._value.handle.sequence
    for pid in first.pids:
        os.kill(pid, signal.SIGKILL)
    pool.start_worker()
    image = batch["image"].clone()
    torch.manual_seed(3)
    Shrinking()
    same = DataLoader(Pictures(4000), batch_size=8, seeding="batch")
    for place, other in enumerate(same):
        if place == number:
            assert torch.equal(image, other["image"])
            break
    assert loader.stats().recalled_batches == 1
    del iterator


@pytest.mark.long
def test_recreated_batch_with_other_values_raises(pool: PoolProcesses) -> None:
    first = pool.start_worker()
    loader = loader_of(pool, ForgetfulPictures(4000))
    model = penstock.offload(Shrinking(), loader, cut="maximal")
    iterator, batch = first_withheld(loader, model)
    for pid in first.pids:
        os.kill(pid, signal.SIGKILL)
    pool.start_worker()
    with pytest.raises(
        RuntimeError,
        match="re-creating the batch when the program read it yielded different values",
    ):
        batch["image"].sum()
    del iterator


@pytest.mark.long
def test_lazy_batch_outlives_its_loader(pool: PoolProcesses) -> None:
    pool.start_worker()
    loader = loader_of(pool, Pictures(4000))
    model = penstock.offload(Shrinking(), loader, cut="maximal")
    iterator, batch = first_withheld(loader, model)
    del iterator, loader, model
    gc.collect()
    assert 100 < float(batch["image"].float().mean()) < 150


def test_leaves_are_fetched_before_own_workers_end(pool: PoolProcesses) -> None:
    loader = loader_of(pool, Pictures(480), num_workers=1)
    model = penstock.offload(Shrinking(), loader, cut="maximal")
    for batch in loader:
        plain_step(model, batch).backward()  # type: ignore[no-untyped-call]
    assert isinstance(batch["image"], LazyTensor)
    assert 100 < float(batch["image"].float().mean()) < 150


@pytest.mark.long
def test_unavailable_leaf_raises_when_read(pool: PoolProcesses) -> None:
    worker = pool.start_worker()
    loader = loader_of(pool, Pictures(4000))
    model = penstock.offload(Shrinking(), loader, cut="maximal")
    iterator, batch = first_withheld(loader, model)
    iterator.source._client.stop()
    worker.end()
    with pytest.raises(PenstockError, match="released its workers"):
        batch["image"].sum()
    assert batch["image"].shape == (8, 3, 64, 64)
    del iterator


def _sum_of(image: torch.Tensor, answers: Any) -> None:
    try:
        answers.put(int(image.sum()))
    except Exception as error:
        answers.put(f"{type(error).__name__}: {error}")


@pytest.mark.long
def test_reading_a_leaf_in_a_forked_process_raises(pool: PoolProcesses) -> None:
    pool.start_worker()
    loader = loader_of(pool, Pictures(4000))
    model = penstock.offload(Shrinking(), loader, cut="maximal")
    iterator, batch = first_withheld(loader, model)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_sum_of, args=(batch["image"], answers))
    process.start()
    answer = answers.get()
    process.join()
    assert "read in another process" in answer
    assert int(batch["image"].sum()) > 0
    del iterator


@pytest.mark.long
def test_last_batch_is_readable_after_its_epoch(pool: PoolProcesses) -> None:
    pool.start_worker()
    loader = loader_of(pool, Pictures(480))
    model = penstock.offload(Shrinking(), loader, cut="maximal")
    for batch in loader:
        plain_step(model, batch).backward()  # type: ignore[no-untyped-call]
    assert batch["image"]._value.is_withheld
    mean = batch["image"].float().mean()
    assert 100 < float(mean) < 150


@pytest.mark.long
def test_in_place_writes_to_leaves_are_kept(pool: PoolProcesses) -> None:
    def step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        loss = plain_step(model, batch)
        if int(batch["class"].sum()) % 13 == 0:
            batch["image"].clamp_(0, 100)
            loss = loss + batch["image"].float().mean() + plain_step(model, batch)
        return loss

    pool.start_worker()
    loader = loader_of(pool, Pictures(400))
    assert losses_of(loader, step, is_offloaded=True) == expected(400, step)
