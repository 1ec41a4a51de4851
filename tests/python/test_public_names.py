# SPDX-License-Identifier: Apache-2.0
"""The visible properties of penstock's types: their modules, their methods and their ``repr()``."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_datasets import Images
from torch.utils.data import Dataset, TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper

import penstock
from penstock import (
    ChunkSampler,
    CostBatchSampler,
    DataLoader,
    MixtureSampler,
    Pool,
    Ranks,
    WaitingMeter,
    errors,
)

ROWS = TensorDataset(torch.zeros(8, 2))


def first_sample(samples: list[Any]) -> Any:
    return samples[0]


@pytest.mark.parametrize(
    ("loader", "shown"),
    [
        (DataLoader(ROWS), "DataLoader(<TensorDataset>)"),
        (
            DataLoader(ROWS, 4, shuffle=True, num_workers=2, pin_memory=True),
            "DataLoader(<TensorDataset>, shuffle=True, batch_size=4, num_workers=2, "
            "pin_memory=True)",
        ),
        (
            DataLoader(ROWS, num_workers="auto", seeding="batch", device="cpu"),
            "DataLoader(<TensorDataset>, num_workers=\"auto\", device='cpu', seeding='batch')",
        ),
        (
            DataLoader(ROWS, sampler=[3, 1], collate_fn=first_sample, fetch_threads=2),
            "DataLoader(<TensorDataset>, sampler=<list>, collate_fn=first_sample, fetch_threads=2)",
        ),
        (
            DataLoader(ROWS, batch_sampler=CostBatchSampler([1] * 8, 3)),
            "DataLoader(<TensorDataset>, batch_sampler=<CostBatchSampler>)",
        ),
        (
            DataLoader(ROWS, batch_size=None, pool="tcp://head:7000"),
            "DataLoader(<TensorDataset>, batch_size=None, pool='tcp://head:7000')",
        ),
        (
            DataLoader(ROWS, pool=Pool("tcp://head:7000", keys=Path("keys"), code_paths=[])),
            "DataLoader(<TensorDataset>, pool=Pool('tcp://head:7000', keys='keys'))",
        ),
    ],
)
def test_repr_shows_options_that_are_not_default(loader: Any, shown: str) -> None:
    assert repr(loader) == shown


def test_repr_shows_ranks_and_closed_loader() -> None:
    loader = DataLoader(ROWS, 2, ranks=Ranks(rank=1, world_size=4))
    shown = repr(loader)
    assert "ranks=Ranks(rank=1, world_size=4, remainder='pad')" in shown and "\n" not in shown
    loader.close()
    assert repr(loader) == f"{shown} (closed)"
    assert repr(DataLoader.__new__(DataLoader)).startswith("DataLoader(<NoneType>")


def test_repr_of_samplers_and_meters() -> None:
    assert repr(MixtureSampler([10, 20])) == "MixtureSampler([10, 20])"
    assert (
        repr(MixtureSampler([10, 20], [0.5, 2.0], when_exhausted="repeat", shuffle=False, seed=3))
        == "MixtureSampler([10, 20], weights=[0.5, 2.0], when_exhausted='repeat', shuffle=False, "
        "seed=3)"
    )
    assert len(repr(MixtureSampler([5] * 1000))) < 60
    assert repr(ChunkSampler([4, 4])) == "ChunkSampler(<2 chunks>, chunks_in_memory=16)"
    assert (
        repr(ChunkSampler([4], 8, readers=2, batch_size=3, shuffle=False, seed=1))
        == "ChunkSampler(<1 chunks>, chunks_in_memory=8, readers=2, batch_size=3, shuffle=False, "
        "seed=1)"
    )
    assert repr(CostBatchSampler([1, 2, 3], 8192)) == "CostBatchSampler(<3 costs>, budget=8192)"
    sampler = CostBatchSampler([1, 2], 2.5, rank=1, world_size=2, batch_size_max=7, seed=9)
    assert (
        repr(sampler)
        == "CostBatchSampler(<2 costs>, budget=2.5, rank=1, world_size=2, batch_size_max=7, seed=9)"
    )
    meter = WaitingMeter(DataLoader(ROWS), every_s=0.5)
    assert repr(meter) == "WaitingMeter(DataLoader(<TensorDataset>), every_s=0.5)"


def test_state_dict_is_a_method_with_a_signature() -> None:
    loader = DataLoader(ROWS, 4)
    assert str(inspect.signature(loader.state_dict)) == "() -> 'dict[str, Any]'"
    assert inspect.isfunction(DataLoader.state_dict) and DataLoader.state_dict.__doc__
    kinds = {one.name: one.kind for one in inspect.classify_class_attrs(DataLoader)}
    assert kinds["state_dict"] == kinds["load_state_dict"] == "method"
    assert loader.state_dict() == DataLoader.state_dict(loader)


def test_subclass_calls_state_dict_of_its_parent() -> None:
    class Named(DataLoader[Any]):
        def state_dict(self) -> dict[str, Any]:
            return {"name": "train", "loader": super().state_dict()}

    loader = Named(ROWS, 4)
    assert loader.state_dict()["loader"] == DataLoader(ROWS, 4).state_dict()


def test_loader_without_state_dict_keeps_its_class() -> None:
    loader = DataLoader(IterableWrapper(range(3)))
    assert not hasattr(loader, "state_dict")
    assert type(loader) is DataLoader and isinstance(loader, torch.utils.data.DataLoader)
    for other in (copy.copy(loader), pickle.loads(pickle.dumps(DataLoader(ROWS)))):
        assert type(other) is DataLoader
    assert typing.get_args(DataLoader[int]) == (int,)


def test_every_exception_is_public() -> None:
    own = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert all(getattr(penstock, name) is value for name, value in own.items())
    assert set(own) - set(penstock.__all__) == {"TimeoutError"}
    names: dict[str, Any] = {}
    exec("from penstock import *", names)
    assert "TimeoutError" not in names, "the builtin is not hidden"


def test_types_of_results_are_public(tmp_path: Path) -> None:
    loader = DataLoader(Images(8), 4)
    for _ in loader:
        pass
    stats = loader.stats()
    assert type(stats) is penstock.LoaderStats
    assert type(stats.ledger) is penstock.StepTimes
    assert all(type(one) is penstock.WorkerTimes for one in stats.workers.values())
    assert all(type(one) is penstock.SlowSample for one in stats.slow_samples)
    assert type(loader.report()) is penstock.LoaderReport
    assert type(penstock.trace(tmp_path / "trace.json")) is penstock.StepTrace
    hints = typing.get_type_hints(penstock.LoaderStats)
    assert hints["worker_choice"] == penstock.WorkerChoice | None
    assert hints["epoch_end"] == penstock.EpochEnd | None
    assert isinstance(penstock.Telemetry, type)


@pytest.mark.parametrize(
    "function",
    [
        DataLoader.plan.fget,
        penstock.offload,
        penstock.explain,
        penstock.progress,
        WaitingMeter.__init__,
    ],
)
def test_public_signatures_name_types(function: Any) -> None:
    annotations = inspect.get_annotations(function)
    untyped = {name for name, kind in annotations.items() if kind == "Any"}
    assert untyped <= {"batch", "options"}, "a batch may be anything, and options are tqdm's"


def test_repr_does_not_call_len_or_repr_of_dataset() -> None:
    class Unsized(Dataset[int]):
        def __len__(self) -> int:
            raise RuntimeError("expensive")

        def __repr__(self) -> str:
            raise RuntimeError("long")

    assert repr(DataLoader(Unsized())) == "DataLoader(<Unsized>)"
