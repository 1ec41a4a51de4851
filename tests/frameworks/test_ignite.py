# SPDX-License-Identifier: Apache-2.0
"""ignite: its deterministic engine rebuilds a loader from its attributes, and resumes by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ignite.engine import DeterministicEngine, Events
from tiny_training import Noisy, linear_model, train_step
from torch.utils.data import DataLoader

import penstock

STOP_AT = 8  # in the middle of the second epoch of 6


def make_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2, **options)


def make_engine(step: Callable[[Any], Any]) -> tuple[DeterministicEngine, list[Any]]:
    """An engine, and where it records every batch and the result of `step`."""
    records: list[Any] = []

    def process(engine: Any, batch: Any) -> None:
        inputs, labels = batch
        records.append((inputs.tolist(), labels.tolist(), step(batch)))

    return DeterministicEngine(process), records


def run_and_resume() -> tuple[Any, Any]:
    """Three epochs, stopped in the second, and the rest in a new engine with a new loader."""
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, first = make_engine(lambda batch: train_step(model, optimizer, batch))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=STOP_AT), engine.terminate)
    loader = make_loader()
    torch.manual_seed(5)
    engine.run(loader, max_epochs=3)
    state = dict(engine.state_dict(), iteration=STOP_AT)
    engine, rest = make_engine(lambda batch: train_step(model, optimizer, batch))
    engine.load_state_dict(state)
    torch.manual_seed(5)
    engine.run(make_loader())
    assert (len(first), len(rest)) == (STOP_AT, 18 - STOP_AT)
    return first + rest, engine.state.dataloader


def run_through() -> tuple[Any, Any]:
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, records = make_engine(lambda batch: train_step(model, optimizer, batch))
    torch.manual_seed(5)
    engine.run(make_loader(), max_epochs=3)
    return records, engine.state.dataloader


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("run", [run_through, run_and_resume])
def test_engine_batches_and_losses_match_torch(
    run: Callable[[], Any],
    same_as_torch: Callable[..., Any],
    assert_used: Callable[[Any], None],
) -> None:
    assert_used(same_as_torch(run))


@pytest.mark.slow
@pytest.mark.usefixtures("loader_name")
def test_resumed_run_yields_the_samples_of_an_unbroken_run() -> None:
    """Not the noise in them: ignite seeds workers by the place where a run starts."""
    through, resumed = (run()[0] for run in (run_through, run_and_resume))
    assert [labels for _, labels, _ in resumed] == [labels for _, labels, _ in through]


@pytest.mark.usefixtures("loader_name")
def test_penstock_options_survive_loader_rebuilding() -> None:
    engine, records = make_engine(lambda batch: None)
    engine.run(penstock.DataLoader(Noisy(), batch_size=4, device="cpu"), max_epochs=1)
    assert engine.state.dataloader.device == "cpu"
    assert len(records) == 6
