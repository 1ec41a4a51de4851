# SPDX-License-Identifier: Apache-2.0
"""One model with several loaders, and several models with one: each keeps its cut.

A program with a training and a validation loader offloaded its model to both, and the second call
silently undid the first. A teacher's `detach` stopped the cut of its student.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from in_process_pool import InProcessPool
from offload_training import bits
from torch import nn
from torch.utils.data import TensorDataset

import penstock
from penstock import detach, offload

pytestmark = pytest.mark.usefixtures("on_one_thread")


class Scaled(nn.Module):
    """A trained model that normalises its bytes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(12, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scaled = (images.float() / 255 - 0.5) / 0.25
        return self.head(self.drop(scaled.flatten(1)))


def images(count: int, first: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(first)
    return [
        torch.randint(0, 256, (4, 3, 2, 2), dtype=torch.uint8, generator=generator)
        for _ in range(count)
    ]


def train_and_validate(model: Any, train: Any, val: Any) -> list[Any]:
    """Two epochs of the most common kind of program, as the values that it computed."""
    torch.manual_seed(11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for _ in range(2):
        model.train()
        for batch in train:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        model.eval()
        with torch.no_grad():
            seen += [model(batch) for batch in val]
    return [bits(one) for one in seen]


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["one call", "two calls"])
def test_training_and_validation_loaders_keep_their_cuts(
    calls: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Scaled()
    twin = copy.deepcopy(model)
    expected = train_and_validate(twin, images(6), images(3, first=1))
    train, val = InProcessPool(images(6)), InProcessPool(images(3, first=1))
    if calls == "one call":
        assert offload(model, train, val, cut="maximal") is model
    else:
        assert offload(offload(model, train, cut="maximal"), val, cut="maximal") is model
    assert train_and_validate(model, train, val) == expected
    for pool in (train, val):
        assert pool.plan is not None and pool.plan.moved and pool.shipped_count > 0
    assert "penstock" not in caplog.text
    assert detach(model) is model
    assert not train.prefixes and not val.prefixes and train.plan is None and val.plan is None
    assert penstock.offload(model, val, cut="maximal") is model, "it can begin again"


@pytest.mark.slow
def test_function_offloaded_to_several_loaders_matches_eager() -> None:
    torch.manual_seed(0)
    model = Scaled().eval()

    def step(batch: torch.Tensor) -> torch.Tensor:
        return model(batch).sum()

    train, val = InProcessPool(images(4)), InProcessPool(images(4, first=1))
    offloaded = offload(offload(step, train, cut="maximal"), val, cut="maximal")
    for pool in (train, val, train):
        for batch, plain in zip(pool, pool.batches, strict=True):
            assert bits(offloaded(batch)) == bits(step(plain))
    assert train.shipped_count > 0 and val.shipped_count > 0
    assert detach(offloaded) is step


@pytest.mark.slow
def test_offloading_again_replaces_options_of_that_loader() -> None:
    model = Scaled().eval()
    train, val = InProcessPool(images(4)), InProcessPool(images(4, first=1))
    offload(model, train, val, cut="maximal")
    for pool in (train, val):
        for batch in pool:
            model(batch)
    assert train.prefixes
    offload(model, train, cut="none")
    assert not train.prefixes and val.prefixes
    for batch in train:
        model(batch)
    assert train.plan is not None and not train.plan.moved
    assert val.plan is not None and val.plan.moved


@pytest.mark.slow
def test_shared_prefix_lasts_until_the_last_model_detaches() -> None:
    torch.manual_seed(0)
    teacher, student = Scaled().eval(), Scaled().eval()
    plain_student = copy.deepcopy(student)
    pool = InProcessPool(images(6))
    offload(teacher, pool, cut="maximal")
    offload(student, pool, cut="maximal")
    for batch in pool:
        teacher(batch), student(batch)
    assert len(pool.prefixes) == 1
    detach(teacher)
    assert len(pool.prefixes) == 1 and pool.plan is not None and pool.plan.moved
    before = pool.shipped_count
    for batch, plain in zip(pool, pool.batches, strict=True):
        assert bits(student(batch)) == bits(plain_student(plain))
    assert pool.shipped_count > before
    detach(student)
    assert not pool.prefixes and pool.plan is None


@pytest.mark.parametrize("loader", [[torch.zeros(2)], None, "loader"])
def test_non_loader_is_rejected_without_side_effects(loader: Any) -> None:
    """A list of batches ended in "'list' object has no attribute '_plan'"."""
    model, pool = Scaled(), InProcessPool(images(1))
    with pytest.raises(TypeError, match=r"offload needs a penstock\.DataLoader, got a "):
        offload(model, pool, loader)
    assert pool.plan is None and model._compiled_call_impl is None


def scaled_before(model: Any) -> Any:
    """A program that converts the batch itself, before it calls its model."""
    return lambda batch: model(batch.float() / 255)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda model: model, scaled_before], ids=["model", "before"])
def test_worker_processes_serve_training_and_validation_cuts(wrap: Any) -> None:
    def loader_of(batches: list[torch.Tensor], loader_class: Any) -> Any:
        return loader_class(TensorDataset(torch.cat(batches)), batch_size=4, num_workers=1)

    def run(loader_class: Any) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(0)
        model = Scaled()
        loaders = [loader_of(images(24), loader_class), loader_of(images(24, 1), loader_class)]
        if loader_class is penstock.DataLoader:
            offload(model, *loaders, cut="maximal")
        step = wrap(model)
        seen = []
        for _ in range(2):
            for loader, mode in zip(loaders, (True, False), strict=True):
                model.train(mode)
                with torch.set_grad_enabled(mode):
                    torch.manual_seed(3)
                    seen += [bits(step(batch)) for (batch,) in loader]
        return seen, loaders

    expected, _ = run(torch.utils.data.DataLoader)
    seen, loaders = run(penstock.DataLoader)
    assert seen == expected
    for loader in loaders:
        assert loader.plan.moved, loader.plan
        assert loader.stats().boundary_batches > 0
