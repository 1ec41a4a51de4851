# SPDX-License-Identifier: Apache-2.0
"""A loader with ``ranks=Ranks()`` in the checkpoints of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import Dataset, TensorDataset
from torchrun_jobs import wait_until_gone

from penstock import DataLoader, MixtureSampler, Ranks

PROGRAM = Path(__file__).with_name("rank_checkpoints.py")
COUNT = 40
SECONDS_MAX = 200


@pytest.mark.slow
@pytest.mark.long("mixture")
@pytest.mark.parametrize("order", ["shuffled", "mixture"])
def test_checkpoint_of_four_ranks_resumes_with_fewer(order: str, tmp_path: Path) -> None:
    """4 ranks save, 2 load and save, 1 loads: the steps equal the steps of a rank that never
    saved."""
    folder, given = tmp_path / "job", {"sizes": [4, 2, 1], "steps": 2, "workers": 1, "order": order}
    command = [sys.executable, PROGRAM, folder, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    wait_until_gone(folder)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["steps"]) == 5 and report["steps"] == report["whole"]
    assert "loader.samples" in report["stored"]
    assert len(set(report["stored"])) == len(report["stored"]), "each part is stored by one rank"


@pytest.mark.slow
@pytest.mark.long("shuffled")
@pytest.mark.parametrize("order", ["shuffled", "mixture"])
def test_checkpoint_has_the_steps_that_were_not_committed(order: str, tmp_path: Path) -> None:
    """4 ranks save with commits in flight, then 2, and 1 commits the rest."""
    given = {"sizes": [4, 2, 1], "steps": 3, "workers": 1, "order": order, "commit": True}
    command = [sys.executable, PROGRAM, tmp_path / "job", json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    wait_until_gone(tmp_path / "job")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["steps"]) == 5
    assert sorted(map(sorted, report["steps"])) == sorted(map(sorted, report["whole"]))


class Remembering(Dataset[int]):
    """A map-style dataset with a state, whose shape changes."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        self.seen[str(index)] = torch.tensor(index)
        return index

    def state_dict(self) -> dict[str, Any]:
        return {"seen": dict(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = dict(state["seen"])


def make_loader(kind: str) -> Any:
    options: dict[str, Any] = {"shuffle": True}
    dataset: Any = Remembering() if kind == "dataset" else TensorDataset(torch.arange(COUNT))
    if kind == "mixture":
        options = {"sampler": MixtureSampler([20, 20], [1, 2], when_exhausted="leave_out")}
    return DataLoader(dataset, ranks=Ranks(global_batch_size=4), **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["shuffled", "mixture", "dataset"])
def test_dcp_state_of_any_position_loads_into_new_loader(kind: str, tmp_path: Path) -> None:
    for count in (1, 3, 10):
        loader = make_loader(kind)
        assert isinstance(loader, Stateful)
        batches = iter(loader)
        for _ in range(count):
            next(batches)
        if count == 10:
            assert next(batches, None) is None
        dcp.save({"loader": loader}, checkpoint_id=tmp_path / str(count))
        state = loader.state_dict()
        expected = [*batches] if count < 10 else [*loader]
        for steps_before in (0, 1):
            other = make_loader(kind)
            for _, _ in zip(range(steps_before), other, strict=False):
                pass
            dcp.load({"loader": other}, checkpoint_id=tmp_path / str(count))
            assert str(other.state_dict()) == str(state)
            assert str([*other]) == str(expected)


def test_all_states_of_a_job_have_the_same_keys() -> None:
    """torch loads the keys of a new loader's state, and leaves out the others."""
    loader = make_loader("shuffled")
    states = [loader.state_dict()]
    for _ in loader:
        states.append(loader.state_dict())
    states.append(loader.state_dict())
    assert {_keys(state) for state in states} == {_keys(states[0])}
    older = {
        name: value for name, value in states[0].items() if name not in ("samples", "samplers")
    }
    loader.load_state_dict({**older, "shards": None})  # as a C++ program writes it
    assert _keys(loader.state_dict()) == _keys(states[0])


def _keys(value: Any, name: str = "") -> tuple[str, ...]:
    if not isinstance(value, dict):
        return (name,)
    return tuple(sorted(one for key in value for one in _keys(value[key], f"{name}.{key}")))
