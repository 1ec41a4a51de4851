# SPDX-License-Identifier: Apache-2.0
"""Programs that do not use pools, run with ``PENSTOCK_POOL`` set: which of their loaders the pool
serves, and what happens to the others.
"""

from __future__ import annotations

import pickle
import random
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_datasets import CODE, Augmented, Shards, digests
from pool_processes import PoolProcesses, pool_of
from torch.utils.data import Dataset, IterDataPipe

from penstock import DataLoader, Pool
from penstock.errors import PoolWarning, UnsentBatchError

NOWHERE = "tcp://127.0.0.1:9"  # without a listener


@pytest.fixture
def _folder_of_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Local workers that serve in addition to a pool keep the program's code here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def variable(monkeypatch: pytest.MonkeyPatch, _folder_of_workers: None) -> str:
    monkeypatch.setenv("PENSTOCK_POOL", NOWHERE)
    return NOWHERE


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


class Locked(Dataset[Any]):
    """Cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rows = torch.arange(12.0)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            return self.rows[index] + torch.rand(())


class Stateful(Augmented):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Pipe(IterDataPipe[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_variable_sets_pool_of_loader_with_workers(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_KEYS", "/keys")
    loader = DataLoader(Augmented(4), num_workers=2, persistent_workers=True, timeout=5)
    assert (loader.pool, loader.keys, loader.timeout) == (variable, "/keys", 5)
    assert DataLoader(Augmented(4), num_workers=2, pool="").pool is None


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (Augmented(4), {}, "num_workers=0 requests batches that this process makes with its"),
        (Augmented(4), {"num_workers": "auto", "seeding": "batch"}, "num_workers='auto' chooses"),
        (Augmented(4), {"num_workers": 1, "seeding": "worker"}, "seeding='worker' makes"),
        (Stateful(4), {"num_workers": 1}, "Stateful has a state_dict"),
        (Pipe(), {"num_workers": 1}, "the dataset is a datapipe"),
    ],
)
def test_loader_no_pool_can_serve_is_skipped_with_one_warning(
    variable: str, dataset: Any, options: dict[str, Any], words: str
) -> None:
    """The program ended at a loader that had worked without the variable, and a loader with
    num_workers=0 was silently sent elsewhere."""
    with pytest.warns(PoolWarning) as told:
        loader = DataLoader(dataset, **options)
    assert loader.pool is None
    (text,) = (str(one.message) for one in told)
    assert text.startswith(f"PENSTOCK_POOL names the pool {variable!r}, but batches of this Data")
    assert words in text
    assert 'pass pool=""' in text
    assert told[0].filename == __file__


def test_in_process_loader_matches_torch_with_variable(
    variable: str,
) -> None:
    with pytest.warns(PoolWarning):
        loader = DataLoader(Locked(), batch_size=4, shuffle=True)
    torch.manual_seed(7)
    found = digests(loader)
    torch.manual_seed(7)
    torchs = torch.utils.data.DataLoader(Locked(), batch_size=4, shuffle=True)
    assert found == digests(torchs)


@pytest.mark.parametrize("seeding", ["batch", "sample"])
def test_seeded_loader_without_workers_uses_the_pool(variable: str, seeding: Any) -> None:
    loader = DataLoader(Augmented(4), seeding=seeding)
    assert (loader.pool, loader.num_workers, loader.prefetch_factor) == (variable, 0, None)
    assert DataLoader(Augmented(4), seeding=seeding, pool="").pool is None
    # As frameworks do, which rebuild a loader from the attributes of another.
    again = DataLoader(Augmented(4), seeding=seeding, pool=loader.pool, prefetch_factor=None)
    assert again.pool == variable


@pytest.mark.slow
def test_pool_batches_match_loader_without_workers(
    steady_pool: PoolProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seeding": "batch"}
    torch.manual_seed(7)
    own = DataLoader(Augmented(24), pool="", **options)
    expected = [digests(own), digests(own)]
    drawn = torch.rand(3).tolist()
    monkeypatch.setenv("PENSTOCK_POOL", steady_pool.endpoint)
    torch.manual_seed(7)
    served = DataLoader(Augmented(24), pool=Pool(None, code_paths=[CODE]), **options)
    assert [digests(served), digests(served)] == expected
    assert torch.rand(3).tolist() == drawn
    assert served.stats().iterator == "pool"


@pytest.mark.slow
def test_unsendable_batches_are_made_in_process(
    steady_pool: PoolProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_POOL", steady_pool.endpoint)
    options: dict[str, Any] = {"batch_size": 4, "seeding": "batch", "collate_fn": ordered}
    torch.manual_seed(7)
    expected = digests(DataLoader(Augmented(12), pool="", **options))
    torch.manual_seed(7)
    loader = DataLoader(Augmented(12), pool=Pool(None, code_paths=[CODE]), **options)
    with pytest.warns(PoolWarning, match=r"names.* are made by this process: .*Unsendab"):
        assert digests(loader) == expected


def test_invalid_variable_address_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_POOL", "alpha:7000")
    with pytest.raises(
        ValueError, match="variable PENSTOCK_POOL must be .*tcp://host:7000', got 'alpha:7000'"
    ):
        DataLoader(Augmented(4))


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1", "tcp://host:", "tcp://:7000", "tcp://host:0", "tcp://host:65536",
     "tcp://host:70x", "tcp://::1:7000", "host:7000"],
)  # fmt: skip
def test_address_without_host_or_port_is_rejected(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address without a port was rejected only by iter()."""
    with pytest.raises(ValueError, match="must be the address of a controller, such as"):
        DataLoader(Augmented(4), pool=address)
    monkeypatch.setenv("PENSTOCK_POOL", address)
    with pytest.raises(ValueError, match="must be the address of a controller, such as"):
        DataLoader(Augmented(4), num_workers=1)


@pytest.mark.parametrize("address", ["tcp://[::1]:7000", "tcp://a-1.example:65535", "tcp://a:1"])
def test_valid_addresses_are_accepted(address: str) -> None:
    assert DataLoader(Augmented(4), pool=address).pool == address


@pytest.mark.slow
def test_unpicklable_dataset_is_served_by_local_workers(
    variable: str,
) -> None:
    """The program ended at iter() with a PicklingError that named no variable."""
    options: dict[str, Any] = {
        "batch_size": 2,
        "shuffle": True,
        "num_workers": 1,
        "multiprocessing_context": "fork",
    }
    torch.manual_seed(7)
    expected = [digests(loader) for loader in [DataLoader(Locked(), pool="", **options)] * 2]
    torch.manual_seed(7)
    loader = DataLoader(Locked(), **options)
    assert loader.pool == variable
    with pytest.warns(PoolWarning, match=r"(?s)PENSTOCK_POOL names.*dataset\.lock.*pool=\"\""):
        found = [digests(loader)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.append(digests(loader))
    assert found == expected
    assert loader.stats().iterator == "penstock"


class NotesPickles(Augmented):
    def __init__(self, notes: Path) -> None:
        super().__init__(4)
        self.notes = notes

    def __getstate__(self) -> Any:
        with open(self.notes, "a") as file:
            file.write("x")
        return vars(self)


@pytest.mark.slow
def test_dataset_is_pickled_once_for_the_first_epoch(variable: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    loader = DataLoader(NotesPickles(notes), num_workers=1, pool=Pool(None, code_paths=[CODE]))
    assert len(list(loader)) == 4
    assert notes.read_text() == "x"


@pytest.mark.slow
def test_state_of_skipped_loader_resumes_new_loader(variable: str) -> None:
    options: dict[str, Any] = {
        "batch_size": 2,
        "num_workers": 1,
        "multiprocessing_context": "fork",
    }
    loader = DataLoader(Locked(), **options)
    with pytest.warns(PoolWarning):
        batches = iter(loader)
    begun = [next(batches), next(batches)]
    state = loader.state_dict()
    del batches
    resumed = DataLoader(Locked(), **options)
    with pytest.warns(PoolWarning):
        resumed.load_state_dict(state)
    assert len(begun) + len(list(resumed)) == 6


class Unsendable(OrderedDict[str, Any]):
    """Of a class that the program has not registered."""


def ordered(samples: list[Any]) -> Any:
    return Unsendable(count=len(samples), samples=samples)


def ordered_from_third_sample(samples: list[Any]) -> Any:
    return ordered(samples) if samples[0]["index"] >= 2 else samples


class OwnRandom:
    """A sampler with a private generator, which cannot be restored."""

    def __init__(self) -> None:
        self.random = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        order = list(range(12))
        self.random.shuffle(order)
        yield from order

    def __len__(self) -> int:
        return 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["shuffle", "own sampler", "own generator", "iterable", "persistent", "prefetch"]
)
def test_unsendable_batches_are_made_by_local_workers(variable: str, case: str) -> None:
    """``penstock run --pool-local`` ended the program at the first batch."""

    def loader(**options: Any) -> Any:
        dataset = Shards(12) if case == "iterable" else Augmented(12)
        if case == "own sampler":
            options["sampler"] = OwnRandom()
        elif case != "iterable":
            options["shuffle"] = True
        if case == "own generator":
            options["generator"] = torch.Generator().manual_seed(5)
        options.update(persistent_workers=case == "persistent", num_workers=2, batch_size=2)
        return DataLoader(dataset, collate_fn=ordered, multiprocessing_context="fork", **options)

    torch.manual_seed(7)
    alone = loader(pool="")
    expected = [digests(alone), digests(alone)]
    drawn = torch.rand(3).tolist()
    torch.manual_seed(7)
    served = loader(pool=Pool(None, code_paths=[CODE]))
    assert served.pool == variable
    if case == "prefetch":
        served.start_prefetch()
    with pytest.warns(
        PoolWarning, match=r"names.* are made by workers of this process: .*Unsendab"
    ):
        found = [digests(served)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.append(digests(served))
    assert found == expected
    assert torch.rand(3).tolist() == drawn
    assert served.stats().iterator == "penstock"


@pytest.mark.slow
@pytest.mark.usefixtures("_folder_of_workers")
def test_explicit_pool_raises_for_unsendable_batches() -> None:
    loader = DataLoader(
        Augmented(4), num_workers=1, pool=Pool(NOWHERE, code_paths=[CODE]), collate_fn=ordered
    )
    with pytest.raises(UnsentBatchError, match=r"(?s)Unsendable.*trust_workers=True") as caught:
        next(iter(loader))
    assert 'pool=""' not in str(caught.value)


@pytest.mark.slow
def test_late_unsendable_batch_error_names_the_variable(variable: str) -> None:
    loader = DataLoader(
        Augmented(4),
        num_workers=1,
        collate_fn=ordered_from_third_sample,
        pool=Pool(None, code_paths=[CODE]),
    )
    batches = iter(loader)
    next(batches), next(batches)
    with pytest.raises(UnsentBatchError, match=r'(?s)Unsendable.*PENSTOCK_POOL: pass pool=""'):
        next(batches)


@pytest.mark.slow
def test_state_of_loader_with_unsendable_batches_resumes(variable: str) -> None:
    def loader() -> Any:
        return DataLoader(
            Augmented(12),
            num_workers=1,
            shuffle=True,
            collate_fn=ordered,
            multiprocessing_context="fork",
            pool=Pool(None, code_paths=[CODE]),
        )

    left_out = loader()
    with pytest.warns(PoolWarning):
        batches = iter(left_out)
    begun = [next(batches)["samples"][0]["index"] for _ in range(5)]
    state = left_out.state_dict()
    rest = [batch["samples"][0]["index"] for batch in batches]
    assert sorted(begun + rest) == list(range(12))
    resumed = loader()
    with pytest.warns(PoolWarning, match="the state of a loader without a pool"):
        resumed.load_state_dict(state)
    assert [batch["samples"][0]["index"] for batch in resumed] == rest


def test_explicit_pool_raises_for_unpicklable_dataset() -> None:
    with pytest.raises(pickle.PicklingError, match=r"dataset\.lock"):
        iter(DataLoader(Locked(), num_workers=1, pool=NOWHERE))


def test_loader_rebuilt_from_attributes_is_not_explicit(
    variable: str,
) -> None:
    first = DataLoader(Augmented(4), num_workers=1)
    with pytest.warns(PoolWarning):
        assert DataLoader(Augmented(4), pool=first.pool).pool is None
    assert DataLoader(Augmented(4), num_workers=1, pool=first.pool).pool == variable


@pytest.mark.long
@pytest.mark.slow
def test_errors_name_the_variable_and_how_to_opt_out(
    pool: PoolProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = r'(?s)by the environment variable PENSTOCK_POOL: .*pool=""'
    worker = pool.start_worker()
    monkeypatch.setenv("PENSTOCK_POOL", pool.endpoint)
    options: dict[str, Any] = {
        "num_workers": 1,
        "timeout": 60,
        "pool": Pool(None, code_paths=[CODE]),
    }
    assert len(list(DataLoader(Augmented(4), **options))) == 4
    monkeypatch.setenv("PENSTOCK_KEYS", str(pool.folder / "none"))
    with pytest.raises(Exception, match=words):
        iter(DataLoader(Augmented(4), **options))
    assert worker.end() == 0
