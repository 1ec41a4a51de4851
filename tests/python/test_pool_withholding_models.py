# SPDX-License-Identifier: Apache-2.0
"""Leaves stay with a pool's workers for models of every kind: compiled ones, TorchScript, and
models with several loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_training import with_own_code
from pool_datasets import CODE, FloatPictures, Pictures, PictureShards
from pool_processes import PoolProcesses, pool_of
from pool_training import (
    IMAGE_BYTES,
    MASK_BYTES,
    Shrinking,
    Step,
    expected,
    loader_of,
    losses_of,
    plain_step,
)

import penstock
from penstock import DataLoader, Pool

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def reading_now_and_then(count_between: int) -> Step:
    """A step that also reads the image outside the model, in one batch out of this many."""
    count = 0

    def step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        nonlocal count
        count += 1
        loss = plain_step(model, batch)
        if count % count_between == 0:
            return loss + batch["image"].float().var() * 1e-3
        return loss

    return step


def adversarial(count_between: int) -> Step:
    """A step that asks for the gradients of the image in one batch out of this many."""
    count = 0

    def step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        nonlocal count
        count += 1
        if count % count_between != 0:
            return plain_step(model, batch)
        image = batch["image"].requires_grad_()
        loss = plain_step(model, batch)
        (gradient,) = torch.autograd.grad(loss, image, retain_graph=True)
        return loss + gradient.abs().sum()

    return step


# ---- Several loaders


def train_with_validation(
    train: Any, val: Any, *, is_offloaded: bool, is_mixed: bool = False
) -> list[float]:
    """Losses of a training with validation after each epoch, or in the middle of each step."""
    torch.manual_seed(0)
    model: Any = with_own_code(Shrinking())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if is_offloaded:
        model = penstock.offload(model, train, val, cut="maximal")
    found = []

    def learn(batch: dict[str, Any]) -> None:
        loss = plain_step(model.train(), batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(loss.item())

    def validate(batch: dict[str, Any]) -> None:
        with torch.no_grad():
            found.append(plain_step(model.eval(), batch).item())

    for _ in range(2):
        if is_mixed:
            for batch, other in zip(train, val, strict=True):
                learn(batch)
                validate(other)
        else:
            for batch in train:
                learn(batch)
            for batch in val:
                validate(batch)
    return found


@pytest.mark.parametrize("is_mixed", [False, True], ids=["after each epoch", "in each step"])
def test_unread_leaves_of_two_loaders_stay_with_workers(
    pool: PoolProcesses, is_mixed: bool
) -> None:
    def seeded() -> dict[str, Any]:
        # A pool's loader draws when iter() is called, and one without workers at the first batch.
        return {"seeding": "batch", "generator": torch.Generator().manual_seed(5)}

    wanted = train_with_validation(
        DataLoader(Pictures(160), batch_size=8, shuffle=True, **seeded()),
        DataLoader(Pictures(160, edge=48), batch_size=8, **seeded()),
        is_offloaded=False,
        is_mixed=is_mixed,
    )
    pool.start_worker(processes=2)  # each serves one loader at a time
    train = loader_of(pool, Pictures(160), **seeded())
    val = loader_of(pool, Pictures(160, edge=48), shuffle=False, **seeded())
    assert train_with_validation(train, val, is_offloaded=True, is_mixed=is_mixed) == wanted
    for loader, part in ((train, 1), (val, (48 / 64) ** 2)):
        stats = loader.stats()
        assert stats.recalled_batches <= 1  # the first of the other worker, which is compared
        assert stats.withheld_bytes > 15 * part * (IMAGE_BYTES + MASK_BYTES)


# ---- Models that the user compiled


def compiled() -> Any:
    return torch.compile(with_own_code(Shrinking()), backend="aot_eager")


def compiled_in_place() -> Any:
    model = with_own_code(Shrinking())
    model.compile(backend="eager", fullgraph=True)
    return model


class Breaking(Shrinking):
    """Python reads the pictures between two graphs in one call of 35."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) + self.mean_now_and_then(images)

    @torch.compiler.disable
    def mean_now_and_then(self, images: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return images.float().mean() if self.count % 35 == 0 else torch.zeros(())


class Reading(Shrinking):
    """Another graph of the same model reads the pictures after some time."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = False

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out = super().forward(images)
        if self.reads:
            return out * self.head.weight.mean() + images.float().var() * self.head.bias.sum()
        return out


def with_other_graph(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    inner = getattr(model, "_orig_mod", model)
    inner.count = getattr(inner, "count", 0) + 1
    inner.reads = inner.count > 40
    return plain_step(model, batch)


def train_on_pool(
    pool: PoolProcesses, make_model: Callable[[], Any], step: Step = plain_step, count: int = 200
) -> Any:
    """Trains with the pool, with the losses of a plain program; returns the loader's statistics."""
    wanted = expected(count, step, make_model)
    pool.start_worker()
    loader = loader_of(pool, Pictures(count))
    assert losses_of(loader, step, is_offloaded=True, make_model=make_model) == wanted
    assert loader.plan.refused is None and loader.plan.moved
    return loader.stats()


@pytest.mark.parametrize("make_model", [compiled, compiled_in_place])
def test_unread_leaves_of_compiled_model_stay_with_workers(
    pool: PoolProcesses, make_model: Callable[[], Any]
) -> None:
    stats = train_on_pool(pool, make_model)
    assert stats.recalled_batches == 0
    assert stats.withheld_bytes > 30 * (IMAGE_BYTES + MASK_BYTES)
    assert stats.batch_bytes < stats.withheld_bytes


def test_last_batch_of_other_size_is_compared_once(pool: PoolProcesses) -> None:
    assert train_on_pool(pool, compiled, count=196).recalled_batches <= 1


def test_leaf_read_outside_compiled_model_is_fetched(pool: PoolProcesses) -> None:
    wanted = expected(200, reading_now_and_then(35), compiled)
    pool.start_worker()
    loader = loader_of(pool, Pictures(200))
    ours = losses_of(loader, reading_now_and_then(35), is_offloaded=True, make_model=compiled)
    assert ours == wanted
    assert loader.stats().recalled_batches == 1


def test_compiled_model_gives_gradients_to_fetched_leaf(pool: PoolProcesses) -> None:
    wanted = expected(200, adversarial(35), compiled, FloatPictures)
    pool.start_worker()
    loader = loader_of(pool, FloatPictures(200))
    ours = losses_of(loader, adversarial(35), is_offloaded=True, make_model=compiled)
    assert ours == wanted
    assert loader.stats().recalled_batches == 1


def test_graph_break_that_reads_a_leaf_fetches_it(pool: PoolProcesses) -> None:
    stats = train_on_pool(
        pool, lambda: torch.compile(with_own_code(Breaking()), backend="aot_eager")
    )
    assert stats.recalled_batches == 1
    assert stats.withheld_bytes > 10 * IMAGE_BYTES


def test_new_graph_that_reads_a_leaf_fetches_it(pool: PoolProcesses) -> None:
    stats = train_on_pool(
        pool,
        lambda: torch.compile(with_own_code(Reading()), backend="aot_eager"),
        with_other_graph,
    )
    assert 1 <= stats.recalled_batches <= 12  # the batches in flight
    assert stats.withheld_bytes > 10 * IMAGE_BYTES


# ---- TorchScript


def scripted() -> Any:
    return torch.jit.script(Shrinking())


def traced() -> Any:
    return torch.jit.trace(Shrinking(), torch.zeros(8, 3, 64, 64, dtype=torch.uint8))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("make_model", [scripted, traced])
def test_unread_leaves_of_script_module_stay_with_workers(
    pool: PoolProcesses, make_model: Callable[[], Any]
) -> None:
    expected(80, plain_step, make_model)  # programs of one class are shared, and settle
    stats = train_on_pool(pool, make_model)
    assert stats.recalled_batches == 0
    assert stats.withheld_bytes > 30 * (IMAGE_BYTES + MASK_BYTES)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_leaf_read_outside_script_module_is_fetched(pool: PoolProcesses) -> None:
    expected(80, plain_step, scripted)
    wanted = expected(200, reading_now_and_then(35), scripted)
    pool.start_worker()
    loader = loader_of(pool, Pictures(200))
    ours = losses_of(loader, reading_now_and_then(35), is_offloaded=True, make_model=scripted)
    assert ours == wanted
    assert loader.stats().recalled_batches == 1


# ---- An iterable dataset


def test_iterable_dataset_batches_are_cut_but_sent_whole(pool: PoolProcesses) -> None:
    """They cannot be made again out of order, so no leaf could be recalled."""
    options: dict[str, Any] = {"shards": 2, "seeding": "batch"}
    plain = DataLoader(PictureShards(160), batch_size=8, **options)
    wanted = losses_of(plain, plain_step, is_offloaded=False)
    pool.start_worker()
    loader = loader_of(pool, PictureShards(160), shuffle=None, **options)
    assert losses_of(loader, plain_step, is_offloaded=True) == wanted
    assert loader.plan.moved
    stats = loader.stats()
    assert (stats.withheld_bytes, stats.recalled_batches) == (0, 0)
    assert stats.batch_bytes > 40 * IMAGE_BYTES  # masks are written with fewer bytes


# ---- A loader without workers


def test_loader_without_workers_is_cut_on_a_pool(
    pool: PoolProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = expected(200, plain_step)
    monkeypatch.setenv("PENSTOCK_POOL", pool.endpoint)
    pool.start_worker()
    loader = DataLoader(
        Pictures(200),
        batch_size=8,
        shuffle=True,
        seeding="batch",
        pool=Pool(None, code_paths=[CODE]),
    )
    assert loader.num_workers == 0
    assert losses_of(loader, plain_step, is_offloaded=True) == wanted
    assert loader.plan.refused is None and loader.plan.moved
    assert loader.stats().withheld_bytes > 30 * (IMAGE_BYTES + MASK_BYTES)
