# SPDX-License-Identifier: Apache-2.0
"""The version of the data in a loader's state: another one is refused, unless it is allowed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from stream_oracle import error_of
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from penstock import DataLoader, Ranks
from penstock.loader.data_version import data_version
from penstock.loader.loader_state import OTHER_DATA_VARIABLE


class Declared(Dataset[Any]):
    """Eight samples of data with a declared version."""

    def __init__(self, **declared: Any) -> None:
        vars(self).update(declared)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return index


class Augmented(Dataset[Any]):
    """A user's dataset around another one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.seen = [1, 2, 3]  # not data

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


def state_of(dataset: Any, **options: Any) -> dict[str, Any]:
    loader: Any = DataLoader(dataset, batch_size=2, **options)
    batches = iter(loader)
    next(batches)
    return json.loads(json.dumps(loader.state_dict()))  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"ranks": Ranks(1, 2)}], ids=["alone", "ranks"])
@pytest.mark.parametrize(
    ("then", "now", "texts"),
    [
        (
            Declared(fingerprint="train-1"),
            Declared(fingerprint="train-2"),
            ("fingerprint train-1", "fingerprint train-2"),
        ),
        (Declared(version=3), Declared(version=4), ("version 3", "version 4")),
        ([*range(8)], [*range(7), 9], ("content ", "content ")),
        (
            Augmented(TensorDataset(torch.zeros(8))),
            Augmented(TensorDataset(torch.ones(8))),
            ("content ", "content "),
        ),
        (
            Subset(Declared(version=3), range(8)),
            Subset(Declared(version=4), range(8)),
            ("version 3, selection ", "version 4, selection "),
        ),
        (
            ConcatDataset([Declared(version=1), Declared(version=2)]),
            ConcatDataset([Declared(version=1), Declared(version=3)]),
            ("version 1; version 2", "version 1; version 3"),
        ),
    ],
)
def test_state_of_other_data_is_refused(
    then: Any, now: Any, texts: tuple[str, str], options: dict[str, Any]
) -> None:
    state = state_of(then, **options)
    loader: Any = DataLoader(now, batch_size=2, **options)
    error = error_of(lambda: loader.load_state_dict(state))
    assert type(error) is ValueError
    assert f"is of data with {texts[0]}" in str(error)
    assert f"reads data with {texts[1]}" in str(error)
    same: Any = DataLoader(then, batch_size=2, **options)
    same.load_state_dict(state)
    assert torch.equal(torch.cat(untyped(same)), torch.cat(untyped(rest_of(then, options))))


def untyped(batches: Any) -> list[torch.Tensor]:
    return [batch if isinstance(batch, torch.Tensor) else batch[0] for batch in batches]


def rest_of(dataset: Any, options: dict[str, Any]) -> list[Any]:
    return [*DataLoader(dataset, batch_size=2, **options)][1:]


def test_other_data_is_read_if_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of([*range(8)])
    other = [*range(4), 14, 15, 16, 17]
    loader: Any = DataLoader(other, batch_size=2)  # type: ignore[arg-type]
    loader.load_state_dict(state, allow_other_data=True)
    again = loader.state_dict()
    assert torch.cat([*loader]).tolist() == other[2:]
    DataLoader(other, batch_size=2).load_state_dict(again)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=OTHER_DATA_VARIABLE):
        loader.load_state_dict(state)
    monkeypatch.setenv(OTHER_DATA_VARIABLE, "1")
    loader.load_state_dict(state)
    assert torch.cat([*loader]).tolist() == other[2:]


def test_unknown_data_is_not_compared() -> None:
    unknown = Augmented(Augmented([object()] * 8))
    assert data_version(unknown) is None
    state = state_of(Declared(version=3))
    DataLoader(Declared(), batch_size=2).load_state_dict(state)
    without = {name: part for name, part in state.items() if name != "data"}  # of older versions
    DataLoader(Declared(version=4), batch_size=2).load_state_dict(without)


def test_state_of_ranks_without_a_version_is_read() -> None:
    """States of older versions have one item at the place of the dataset's state."""
    state = state_of([*range(8)], ranks=Ranks(0, 2))
    assert "data" not in state
    assert state["dataset"] == [None, data_version([*range(8)])]
    loader: Any = DataLoader([*range(8)], batch_size=2, ranks=Ranks(0, 2))  # type: ignore[arg-type]
    loader.load_state_dict({**state, "dataset": None})
    assert torch.cat([*loader]).tolist() == [4, 5]


def test_version_that_is_no_text_is_refused() -> None:
    state = state_of([*range(8)])
    loader: Any = DataLoader([*range(8)], batch_size=2)  # type: ignore[arg-type]
    error = error_of(lambda: loader.load_state_dict({**state, "data": ["content"]}))
    assert type(error) is ValueError
    assert "state['data'] must be a string or None, got list of 1" in str(error)


def test_epoch_reads_the_version_once() -> None:
    class Costly(Declared):
        reads = 0

        @property
        def fingerprint(self) -> str:
            self.reads += 1
            return "train"

    data = Costly()
    loader: Any = DataLoader(data, batch_size=2)
    for _ in loader:
        loader.state_dict()
    assert data.reads == 1


def test_version_changes_with_the_listing_of_a_folder() -> None:
    class Folder(Declared):
        samples: list[tuple[str, int]]

    one = Folder(samples=[("/data/cats/1.png", 0)])
    moved = Folder(samples=[("/local/cats/1.png", 0)])
    other = Folder(samples=[("/data/cats/2.png", 0)])
    assert data_version(one) == data_version(moved) != data_version(other)


def test_long_texts_cost_little() -> None:
    megabyte = "x" * (1 << 20)
    documents = [megabyte] * 10_000
    assert data_version(documents) != data_version([*documents[:-1], megabyte + "x"])


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("lance", "Lance version"),
        ("lancedb", "Lance version"),
        ("deeplake", "Deep Lake version"),
        ("pyiceberg", "Iceberg snapshot"),
        ("datasets", "Hugging Face fingerprint"),
    ],
)
def test_tables_of_libraries_have_their_own_versions(
    library: str, name: str, tmp_path: Path
) -> None:
    """In a separate process, since some of the libraries leave threads and descriptors."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    script = Path(__file__).with_name("table_versions.py")
    ran = subprocess.run(
        [sys.executable, str(script), library, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    before, again, after = json.loads(ran.stdout.splitlines()[-1])
    assert before.startswith(name)
    assert before == again
    assert after.startswith(name)
    assert after != before
