# SPDX-License-Identifier: Apache-2.0
"""A pool's workers make batches under the settings of the trainer's process, each epoch has the
trainer's current dataset, and no job affects the next one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool_datasets import CODE
from pool_processes import SECONDS_MAX, PoolProcesses, pool_of
from torch.utils.data import Dataset

from penstock import DataLoader, Pool
from penstock.pool.process_settings import JobSettings, ProcessState

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcesses]:
    """One worker, which serves all jobs of this module."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for opened in pool_of(tmp_path_factory.mktemp("settings"), monkeypatch):
            opened.start_worker()
            yield opened


@pytest.fixture(autouse=True)
def settings_put_back() -> Iterator[None]:
    before = ProcessState.now()
    yield
    before.restore()


class Settings(Dataset[dict[str, Any]]):
    """A sample that depends on a process's settings."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        from PIL import ImageFile

        return {
            "default_dtype": str(torch.tensor([1.5]).dtype),
            "scale": torch.tensor(float(os.environ.get("SCALE_OF_TEST", "1"))),
            "denormal": torch.tensor([1e-39], dtype=torch.float32).mul(0.5),
            "deterministic": torch.tensor(torch.are_deterministic_algorithms_enabled()),
            "matmul": torch.get_float32_matmul_precision(),
            "folder": os.getcwd(),
            "zone": time.strftime("%Z", time.localtime(0)),
            "truncated": torch.tensor(ImageFile.LOAD_TRUNCATED_IMAGES),
            "numpy": np.geterr()["divide"],
        }


class Counting(Dataset[torch.Tensor]):
    """Counts its calls, which the next epoch must not see."""

    def __init__(self) -> None:
        self.count = 0
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        return torch.tensor([self.count, self.generator.integers(1 << 30)])


class Unpickled(Dataset[int]):
    """Records in a file each time that it is unpickled, and never changes."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with self.log.open("a") as file:
            file.write("unpickled\n")


def batches_of(loader: DataLoader[Any]) -> list[Any]:
    return [
        {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in (batch if isinstance(batch, dict) else {"": batch}).items()
        }
        for batch in loader
    ]


def pooled(pool: PoolProcesses, dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, pool=Pool(pool.endpoint, code_paths=[CODE]), timeout=60, **options)


def alone(dataset: Any) -> DataLoader[Any]:
    return DataLoader(dataset, seeding="batch")


@pytest.mark.long("0-2", "1-1")
@pytest.mark.parametrize("fetch_threads", [1, 2])
@pytest.mark.parametrize("own_workers", [0, 1])
def test_workers_use_the_settings_of_the_program(
    pool: PoolProcesses, tmp_path: Path, own_workers: int, fetch_threads: int
) -> None:
    from PIL import ImageFile

    plain = batches_of(alone(Settings()))
    torch.set_default_dtype(torch.float64)
    torch.set_flush_denormal(True)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    np.seterr(divide="ignore")
    os.environ["SCALE_OF_TEST"] = "3"
    os.environ["TZ"] = "NZST-12"
    time.tzset()
    os.chdir(tmp_path)
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    expected = batches_of(alone(Settings()))
    assert all(expected[0][name] != plain[0][name] for name in plain[0])
    loader = pooled(
        pool,
        Settings(),
        num_workers=own_workers,
        fetch_threads=fetch_threads,
        multiprocessing_context="spawn" if own_workers else None,
    )
    assert batches_of(loader) == expected


def test_settings_of_a_job_do_not_affect_the_next(pool: PoolProcesses) -> None:
    expected = batches_of(alone(Settings()))

    def spoil(worker_id: int) -> None:
        torch.set_default_dtype(torch.float64)
        os.environ["SCALE_OF_TEST"] = "5"
        os.chdir("/")

    first = pooled(pool, Settings(), worker_init_fn=spoil)
    spoilt = batches_of(first)
    assert spoilt[0]["scale"] == [5.0]
    assert batches_of(pooled(pool, Settings())) == expected
    assert batches_of(first) == spoilt


def test_settings_changed_between_epochs_reach_the_workers(pool: PoolProcesses) -> None:
    loader = pooled(pool, Settings())
    assert [batch["scale"] for batch in batches_of(loader)] == [[1.0]] * 4
    os.environ["SCALE_OF_TEST"] = "7"
    assert [batch["scale"] for batch in batches_of(loader)] == [[7.0]] * 4
    del os.environ["SCALE_OF_TEST"]
    assert [batch["scale"] for batch in batches_of(loader)] == [[1.0]] * 4


def test_each_epoch_and_loader_starts_with_the_dataset_as_sent(pool: PoolProcesses) -> None:
    expected = batches_of(alone(Counting()))
    assert expected[0][""][0][0] == 1
    loader = pooled(pool, Counting())
    assert [batches_of(loader) for _ in range(3)] == [expected] * 3
    assert batches_of(pooled(pool, Counting())) == expected


PROGRAM = """
import json
import sys
import numpy as np
import torch
from penstock import DataLoader

class Augmented(torch.utils.data.Dataset):
    def __init__(self):
        self.generator = np.random.default_rng(0)
        self.pictures = torch.linspace(-1, 1, 32 * 6).view(32, 6)

    def __len__(self):
        return 32

    def __getitem__(self, index):
        picture = self.pictures[index]
        picture.add_(float(self.generator.normal())).sin_()  # in place, in the dataset's own memory
        return picture.clone(), index % 2

if __name__ == "__main__":
    torch.manual_seed(3)
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = json.loads(sys.argv[1])
    loader = DataLoader(Augmented(), batch_size=4, shuffle=True, timeout=60, **options)
    losses = []
    for _ in range(3):
        for pictures, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    print(json.dumps(losses))
"""


def test_repeated_runs_with_a_changing_dataset_have_equal_losses(
    pool: PoolProcesses, tmp_path: Path
) -> None:
    """The worker continued with the dataset that the run before had changed."""
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)

    def losses(**options: Any) -> list[float]:
        done = subprocess.run(
            [sys.executable, str(path), json.dumps(options)],
            env=pool.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
        )
        assert done.returncode == 0, done.stderr
        found: list[float] = json.loads(done.stdout)
        return found

    expected = losses(num_workers=1, seeding="batch")
    assert len(expected) == 24 and len(set(expected)) == 24
    assert [losses(pool=pool.endpoint) for _ in range(2)] == [expected] * 2


def test_unchanged_dataset_is_unpickled_once(pool: PoolProcesses, tmp_path: Path) -> None:
    log = tmp_path / "log"
    loader = pooled(pool, Unpickled(log))
    assert [len(batches_of(loader)) for _ in range(3)] == [4] * 3
    assert log.read_text().splitlines() == ["unpickled"]


def test_secrets_and_launcher_variables_are_not_sent() -> None:
    os.environ["SCALE_OF_TEST"] = "3"
    os.environ["MY_API_KEY"] = "secret"
    os.environ["RANK"] = "1"
    os.environ["PENSTOCK_SOMETHING"] = "1"
    settings = JobSettings.here()
    assert settings.environment["SCALE_OF_TEST"] == "3"
    assert not {"MY_API_KEY", "RANK", "PENSTOCK_SOMETHING"} & settings.environment.keys()


@pytest.mark.parametrize(
    "fields",
    [
        {"torch": {"mkldnn": 1}},
        {"torch": {"other": True}},
        {"folder": 1},
        {"environment": {"A": 1}},
        {"numpy_errors": {"divide": 1}},
        {"other": 1},
    ],
)
def test_settings_of_wrong_types_are_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        JobSettings.of_fields(fields)
