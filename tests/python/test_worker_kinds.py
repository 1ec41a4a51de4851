# SPDX-License-Identifier: Apache-2.0
"""Workers whose kernels give different bits from the trainer's, as on another CPU."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_datasets import CODE, Images, Logarithms
from pool_processes import PoolProcesses, pool_of
from torch import nn

import penstock
from penstock import _C, DataLoader, Pool
from penstock.errors import PoolWarning
from penstock.pool.pool_status import PoolStatus, name_of, status_text

STEPS = 61
OTHER_KIND = {"ATEN_CPU_CAPABILITY": "default"}
DIFFERENT = "with different values"


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


class Normalised(nn.Module):
    """A layer behind kernels whose last bits depend on the CPU, behind casts and scaling, which are
    exact on all."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scaled = images.float() * 0.25 + 1
        logarithm = torch.log1p(scaled)
        centred = (logarithm - logarithm.mean((2, 3), keepdim=True)) / logarithm.std(
            (2, 3), keepdim=True
        )
        return self.head(torch.sigmoid(torch.softmax(centred, dim=3).mean(2)).flatten(1))


def losses_of(loader: DataLoader[Any], *, is_offloaded: bool) -> list[float]:
    torch.manual_seed(0)
    model: Any = Normalised()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if is_offloaded:
        model = penstock.offload(model, loader, cut="maximal")
    losses = []
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this CPU has no other kind"
)
def test_worker_with_other_kernels_changes_no_loss(pool: PoolProcesses) -> None:
    pool.start_worker()
    pool.start_worker(environment=OTHER_KIND)
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True}
    dataset = Images(8 * STEPS)
    expected = losses_of(DataLoader(dataset, seeding="batch", **options), is_offloaded=False)
    loader = DataLoader(dataset, pool=Pool(pool.endpoint, code_paths=[CODE]), timeout=60, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = losses_of(loader, is_offloaded=True)
    assert losses == expected
    assert len(losses) == STEPS
    assert loader.stats().boundary_batches > STEPS // 2
    told = [str(one.message) for one in caught if issubclass(one.category, PoolWarning)]
    assert len([text for text in told if "workers with different hardware" in text]) == 1
    assert not [text for text in told if DIFFERENT in text]  # its dataset is exact
    plan = loader.plan
    assert len(plan.workers_apart) == 1
    assert "exponentials" in plan.workers_apart[0]
    assert plan.workers_apart[0] in " ".join(str(plan).split())


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this CPU has no other kind"
)
def test_status_shows_worker_with_other_kernels(pool: PoolProcesses) -> None:
    pool.start_worker()
    other = pool.start_worker(environment=OTHER_KIND)
    loader = DataLoader(
        Images(64), pool=Pool(pool.endpoint, code_paths=[CODE]), timeout=60, batch_size=8
    )
    batches = iter(loader)
    next(batches)
    deadline = time.monotonic() + 60
    while True:
        status = PoolStatus(pool.status())
        lines = status_text(status).splitlines()
        apart = [line for line in lines if "only the exact part" in line]
        if apart or time.monotonic() > deadline:
            break
        time.sleep(0.1)  # members report now and then
    [name] = [
        name_of(worker)
        for worker in status.fields["workers"]
        if f"process {other.pids[0]}" in worker["about"]
    ]
    assert len(apart) == 1 and name in apart[0], lines
    kinds = [line for line in lines if "kernels are of 2 kinds" in line]
    assert len(kinds) == 1 and name in kinds[0], lines
    assert len(list(batches)) == 7


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this CPU has no other kind"
)
def test_kernel_dependent_dataset_warns_once(
    pool: PoolProcesses,
) -> None:
    """The losses differed from run to run, without any message."""
    pool.start_worker()
    pool.start_worker(environment=OTHER_KIND)
    loader = DataLoader(
        Logarithms(200), pool=Pool(pool.endpoint, code_paths=[CODE]), timeout=60, batch_size=4
    )
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):  # one of the workers may join too late for the first epoch
            assert len(list(loader)) == 50
            told = [str(one.message) for one in caught if DIFFERENT in str(one.message)]
            if told:
                break
        for _ in range(2):
            assert len(list(loader)) == 50
        told = [str(one.message) for one in caught if DIFFERENT in str(one.message)]
    assert len(told) == 1, told
    assert told[0].startswith("workers ") and told[0].count(" at tcp://127.0.0.1:") == 2
    assert "exponentials" in told[0]


@pytest.mark.slow
def test_fingerprint_is_independent_of_process_settings() -> None:
    settings = (
        "0",
        "torch.set_num_threads(1)",
        "torch.set_num_threads(2)",
        "torch.set_flush_denormal(True)",
        "torch.set_default_dtype(torch.float64)",
        "torch.use_deterministic_algorithms(True)",
    )
    # Each in a separate process, before any other computation.
    program = f"""
import os
import torch
from penstock import _C
for setting in {settings}:
    if os.fork() == 0:
        exec(setting)
        print(_C.numeric_fingerprint(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, setting
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [f"{_C.numeric_fingerprint()}"] * len(settings)
