# SPDX-License-Identifier: Apache-2.0
"""accelerate: it rebuilds a loader with the class that it imported from torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from program_runs import run_ranks
from tiny_training import Noisy, linear_model, train_step
from torch.utils.data import DataLoader

import penstock

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its state in the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train_prepared() -> tuple[Any, Any]:
    accelerator = Accelerator(cpu=True)
    model = linear_model()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2),
    )
    losses = [train_step(model, optimizer, batch) for _ in range(2) for batch in loader]
    return losses, loader.base_dataloader


def skip_two_batches() -> tuple[Any, Any]:
    loader = Accelerator(cpu=True).prepare(DataLoader(Noisy(), batch_size=4, num_workers=2))
    rest = skip_first_batches(loader, 2)
    return [labels.tolist() for _, labels in rest], rest.base_dataloader


@pytest.mark.parametrize("run", [train_prepared, skip_two_batches])
def test_prepared_loader_matches_torch(
    run: Callable[[], Any],
    same_as_torch: Callable[..., Any],
    assert_used: Callable[[Any], None],
) -> None:
    assert_used(same_as_torch(run))


RANKS = """
    import json, sys
    import penstock, torch
    from accelerate import Accelerator
    from tiny_training import Noisy, linear_model, train_step
    from torch.utils.data import DataLoader

    def train():
        torch.manual_seed(1)
        accelerator = Accelerator(cpu=True)
        model = linear_model()
        model, optimizer, loader = accelerator.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=1),
        )
        losses = [train_step(model, optimizer, batch) for _ in range(2) for batch in loader]
        base = loader.base_dataloader
        return {
            "losses": losses,
            "ranks": accelerator.num_processes,
            "is ours": isinstance(base, penstock.DataLoader),
            "iterator": base.stats().iterator if hasattr(base, "stats") else None,
        }

    report = {"torch": train()}
    penstock.install()
    report["penstock"] = train()
    print(json.dumps(report))
    torch.distributed.destroy_process_group()
"""


@pytest.mark.long
def test_two_ranks_share_the_data_and_match_torch_losses(tmp_path: Path) -> None:
    reports = [json.loads(out.splitlines()[-1]) for out in run_ranks(RANKS, tmp_path)]
    for report in reports:
        ours, torchs = report["penstock"], report["torch"]
        assert ours["ranks"] == torchs["ranks"] == 2
        assert (torchs["is ours"], ours["is ours"]) == (False, True)
        assert ours["iterator"] == "penstock"
        # 22 samples in batches of 3 are 8; each rank takes every other.
        assert len(torchs["losses"]) == 8
        assert ours["losses"] == torchs["losses"]
    first, second = (report["torch"]["losses"] for report in reports)
    assert first != second


def test_prepared_loader_resumes_from_its_state() -> None:
    """It wraps the loader's state, which it requests before every batch."""
    penstock.install()
    try:
        accelerator = Accelerator(cpu=True)

        def prepared() -> Any:
            torch.manual_seed(4)
            return accelerator.prepare_data_loader(
                DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2)
            )

        def labels(batches: Any) -> list[Any]:
            return [labels.tolist() for _, labels in batches]

        expected = labels(prepared())
        loader = prepared()
        for place, _ in enumerate(loader):
            if place == 2:
                break
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = prepared()
        resumed.load_state_dict(state)
        assert labels(resumed) == expected[3:]
        assert resumed.state_dict()["_iterator_finished"]
    finally:
        penstock.uninstall()
