# SPDX-License-Identifier: Apache-2.0
"""Features of penstock's DataLoader beyond torch's: options, stats, fallbacks."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_datasets import Computed, Streamed, number
from script_runs import running
from stream_oracle import describe, error_of
from torch.utils.data import IterDataPipe, TensorDataset, default_collate
from torch.utils.data.datapipes.iter import IterableWrapper

from penstock import DataLoader, Pool
from penstock.errors import FallbackError, PenstockError, UnsupportedError


class Unsized:
    def __iter__(self) -> Iterator[int]:
        raise TypeError("no numbers today")


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_FALLBACK", "error")


def numbers_pipe() -> IterDataPipe[int]:
    return IterableWrapper(list(range(6))).shuffle()


def test_dataloader_subclasses_torch_under_the_same_name() -> None:
    assert issubclass(DataLoader, torch.utils.data.DataLoader)
    assert DataLoader.__name__ == "DataLoader"


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(("workers", "kind"), [(0, "torch"), (1, "penstock")])
def test_stats_name_the_iterator_in_use(workers: int, kind: str) -> None:
    loader = DataLoader([1, 2, 3], num_workers=workers)
    assert loader.stats().iterator is None
    list(loader)
    assert loader.stats().iterator == kind
    assert loader.stats().fallback_reason is None


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": None},
        {"sampler": ["a", "b"], "collate_fn": list},
        {"batch_sampler": [[0], [1, 1]]},
        {"in_order": False},
        {"timeout": 30},
        {"persistent_workers": True, "prefetch_factor": 7},
        {"worker_init_fn": print},
        {"pin_memory": True},
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_torch_options_cause_no_fallback(options: dict[str, Any]) -> None:
    data = {0: 3, 1: 4, 2: 5, 3: 6, "a": 1, "b": 2}
    options = {"sampler": [0, 1], **options} if "batch_sampler" not in options else options
    loader = DataLoader(data, num_workers=1, **options)  # type: ignore[arg-type, var-annotated]
    assert list(loader)
    assert loader.stats().iterator == "penstock"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "cuda:3"),
        ("seeding", "sample"),
        ("shards", 2),
        ("prefetch_bytes", 1 << 20),
        ("fetch_threads", 2),
        ("code_paths", (".",)),
        ("trust_workers", True),
    ],
)
def test_options_that_torch_would_ignore_are_rejected_with_a_datapipe(
    name: str, value: Any
) -> None:
    """The batches were on the CPU, without any message."""
    words = f"for a datapipe, which torch's iterator reads, got {value!r}"
    loader = DataLoader(numbers_pipe(), num_workers=1)
    setattr(loader, name, value)
    option: dict[str, Any] = {name: value}
    if name in ("code_paths", "trust_workers"):
        option = {"pool": Pool(None, **option)}
    for make in (lambda: iter(loader), lambda: DataLoader(numbers_pipe(), 1, **option)):
        error = error_of(make)
        assert type(error) is ValueError
        assert str(error).startswith(f"{name} must be ") and words in str(error)


def test_datapipe_accepts_options_without_effect() -> None:
    loader = DataLoader(numbers_pipe(), device="cpu", seeding="worker", overlap_epochs=False)
    assert sorted(loader) == list(range(6))


def test_start_method_is_rejected_with_a_pool_and_no_workers() -> None:
    with pytest.raises(ValueError, match="multiprocessing_context can only be used with multi-pro"):
        DataLoader([1], pool="tcp://127.0.0.1:9", multiprocessing_context="spawn")


def test_datapipe_falls_back_and_stats_give_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_FALLBACK", raising=False)
    torch.manual_seed(3)
    want = list(torch.utils.data.DataLoader(numbers_pipe(), batch_size=2, num_workers=1))
    loader = DataLoader(numbers_pipe(), batch_size=2, num_workers=1)
    torch.manual_seed(3)
    assert describe(list(loader)) == describe(want)
    stats = loader.stats()
    assert stats.iterator == "fallback"
    assert stats.fallback_reason is not None and "datapipe" in stats.fallback_reason


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("workers", [0, 1])
def test_fallback_can_be_made_an_error(workers: int) -> None:
    loader = DataLoader(numbers_pipe(), num_workers=workers)
    with pytest.raises(FallbackError, match="datapipe.*PENSTOCK_FALLBACK"):
        iter(loader)


def test_stats_include_finished_epochs_and_live_iterators() -> None:
    loader = DataLoader(TensorDataset(torch.arange(40.0)), batch_size=4, num_workers=2)
    list(loader)
    assert loader.stats().batches == 10
    assert loader.stats().batch_bytes >= 160
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    assert loader.stats().batches == 13
    del iterator
    assert loader.stats().batches == 13


def test_stats_accumulate_over_persistent_epochs() -> None:
    loader = DataLoader(Computed(6, number), num_workers=2, persistent_workers=True)
    for epoch in range(1, 4):
        list(loader)
        assert loader.stats().batches == 6 * epoch


@pytest.mark.parametrize("text", ["0", "-1", "many", "", "1.5"])
def test_invalid_arena_size_is_rejected_with_its_value(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ARENA_BYTES", text)
    error = error_of(lambda: iter(DataLoader([1], num_workers=1)))
    assert type(error) is ValueError
    assert str(error).startswith("PENSTOCK_ARENA_BYTES must be a positive number of bytes")
    assert f"got {text!r}" in str(error)


@pytest.mark.parametrize("workers", [0, 1])
def test_cpu_is_accepted_as_device(workers: int) -> None:
    loader = DataLoader(Computed(4, number), batch_size=2, num_workers=workers, device="cpu")
    assert loader.device == "cpu"
    assert all(batch.device.type == "cpu" for batch in loader)


def test_changing_device_replaces_the_persistent_iterator() -> None:
    loader = DataLoader(Computed(4, number), num_workers=1, persistent_workers=True)
    first = iter(loader)
    assert iter(loader) is first
    loader.device = "cpu"
    assert iter(loader) is not first


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_missing_device_is_rejected_by_iter(workers: int) -> None:
    loader = DataLoader([1], num_workers=workers, device="cuda")
    error = error_of(lambda: iter(loader))
    assert type(error) is UnsupportedError
    assert "torch finds no CUDA device (" in str(error)


@pytest.mark.parametrize("workers", [0, 1])
def test_outdated_driver_is_named_in_the_error(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    error = error_of(lambda: iter(DataLoader([1], num_workers=workers, device="cuda:0")))
    assert type(error) is UnsupportedError
    assert "too old (found version 11040)" in str(error)
    assert str(error).endswith("pass device=None, or use a machine with a CUDA device")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("count", "there"), [(1, "only cuda:0"), (4, "cuda:0 to cuda:3")])
def test_device_index_out_of_range_lists_the_available_devices(
    workers: int, count: int, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    error = error_of(lambda: iter(DataLoader([1], num_workers=workers, device=f"cuda:{count}")))
    assert type(error) is UnsupportedError
    assert f"device='cuda:{count}' is not available: torch finds {there};" in str(error)


@pytest.mark.parametrize("workers", [0, 1])
def test_unsupported_device_type_is_rejected_by_iter(workers: int) -> None:
    loader = DataLoader([1], num_workers=workers, device="meta")
    error = error_of(lambda: iter(loader))
    assert type(error) is UnsupportedError
    assert str(error).startswith("device='meta' is not available: torch finds ")


def test_failed_iter_raises_no_second_error_in_del(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's iterator also prints an AttributeError of its __del__."""
    ignored: list[Any] = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda unraisable: ignored.append(unraisable.exc_value)
    )
    for options in ({"device": "meta"}, {"prefetch_factor": 0}, {"sampler": Unsized()}):
        assert error_of(lambda options=options: iter(DataLoader([1], num_workers=1, **options)))
        gc.collect()
    assert ignored == []


def test_plan_is_none_at_first_and_read_only() -> None:
    loader = DataLoader([1])
    assert loader.plan is None
    with pytest.raises(AttributeError):
        loader.plan = "mine"  # type: ignore[misc]


def test_loader_in_use_can_be_copied_and_pickled() -> None:
    loader = DataLoader(Computed(20, number), batch_size=2, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    for twin in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert len(list(twin)) == 10
    assert len(list(iterator)) == 9


def test_persistent_loader_in_use_cannot_be_pickled() -> None:
    loader = DataLoader(Computed(4, number), num_workers=1, persistent_workers=True)
    next(iter(loader))
    with pytest.raises(NotImplementedError, match="cannot be pickled"):
        pickle.dumps(loader)


def test_errors_derive_from_penstock_error() -> None:
    assert issubclass(FallbackError, PenstockError)
    assert issubclass(UnsupportedError, PenstockError)


def changing_registry() -> str:
    return """
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

def loud(batch, *, collate_fn_map=None):
    return ("changed", len(batch))

default_collate_fn_map[torch.Tensor] = loud
from torch.utils.data import DataLoader

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.ones(2)

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        loader = DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context=method)
        print(list(loader))
    rows = torch.utils.data.TensorDataset(torch.ones(2))
    print(list(DataLoader(rows, batch_size=2, num_workers=1)))
"""


@pytest.mark.long
@pytest.mark.slow
def test_collate_registry_changed_before_import_is_used(tmp_path: Path) -> None:
    """penstock's collate replaced torch's when the change was made before its import."""
    with running("penstock", changing_registry(), tmp_path) as run:
        changed = "('changed', 2)"
        lines = f"[{changed}, {changed}]\n" * 2 + f"[[{changed}]]\n"
        assert run.finish() == (0, lines, "")


@pytest.mark.long
@pytest.mark.slow
def test_import_starts_no_thread_and_loads_no_dynamo_or_cuda(tmp_path: Path) -> None:
    code = (
        "import os, sys, torch; before = len(os.listdir('/proc/self/task')); import penstock;"
        "print(len(os.listdir('/proc/self/task')) - before, 'torch._dynamo' in sys.modules,"
        "torch.cuda.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("0 False False\n", 0), done.stderr


def test_ten_concurrent_loaders_do_not_mix_their_batches() -> None:
    loaders = [
        DataLoader(Computed(12, lambda index, k=k: 100 * k + index), num_workers=1)
        for k in range(10)
    ]
    iterators = [iter(loader) for loader in loaders]
    for index in range(12):
        for k, iterator in enumerate(iterators):
            assert int(next(iterator)) == 100 * k + index


def test_default_collate_works_inside_the_dataset() -> None:
    """A dataset that batches itself calls torch's collate in the worker."""

    def groups() -> Iterator[Any]:
        for start in range(0, 60, 6):
            first = default_collate([torch.tensor([float(start + k)]) for k in range(3)])
            second = default_collate([torch.tensor([float(start + 3 + k)]) for k in range(3)])
            yield {"both": torch.cat([first, second]), "first": first}

    seen = list(DataLoader(Streamed(groups), batch_size=None, num_workers=1))
    for number_of_group, group in enumerate(seen):
        start = 6 * number_of_group
        assert group["both"].flatten().tolist() == [float(start + k) for k in range(6)]
        assert group["first"].flatten().tolist() == [float(start + k) for k in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("is_replaced", [False, True])
def test_sampler_iter_cannot_be_advanced_or_replaced_after_iter(is_replaced: bool) -> None:
    iterator: Any = iter(DataLoader(Computed(12, number), batch_size=2, num_workers=1))
    if is_replaced:
        iterator._sampler_iter = iter([[0, 1]])
    with pytest.raises(UnsupportedError, match="_sampler_iter must be advanced or replaced before"):
        next(iterator if is_replaced else iterator._sampler_iter)
