# SPDX-License-Identifier: Apache-2.0
"""The name of a loader, by which displays tell the loaders of a program apart."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

import penstock
from penstock import DataLoader
from penstock.loader.options import LoaderOptions
from penstock.loader.pool_source import job_name


def test_name_is_shown_by_repr_stats_and_report() -> None:
    loader = DataLoader(range(8), batch_size=2, name="train")
    assert repr(loader) == "DataLoader(<range>, name='train', batch_size=2)"
    assert str(loader.stats()) == "DataLoader 'train' has not been iterated over"
    assert str(loader.report()).startswith("DataLoader 'train' has counted no steps yet")
    list(loader)
    assert str(loader.stats()).startswith("DataLoader 'train' (torch) ")
    assert str(loader.report()).startswith("DataLoader 'train' (torch) took 4 steps of ")
    assert json.loads(loader.report().to_json())["name"] == loader.stats().name == "train"


def test_job_of_a_pool_has_the_name_or_else_the_dataset() -> None:
    def job_of(**options: Any) -> str:
        return job_name(LoaderOptions.of(DataLoader(range(8), **options))).partition(": ")[2]

    assert job_of(name="train") == "train"
    assert job_of() == "range"


def test_copies_keep_the_name() -> None:
    loader = DataLoader(range(8), name="train")
    assert copy.copy(loader).name == pickle.loads(pickle.dumps(loader)).name == "train"
    assert DataLoader(range(8)).name is None


def test_trace_names_the_tracks_of_each_loader(tmp_path: Path) -> None:
    loaders = [DataLoader(range(8), name=name) for name in ("train", "validation")]
    with penstock.trace(tmp_path / "trace.json") as traced:
        for loader in loaders:
            list(loader)
    assert traced.path is not None
    text = traced.path.read_text()
    assert "train" in text
    assert "validation" in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "name must be 1 to 64 printable characters, got ''"),
        ("a" * 65, "name must be 1 to 64 printable characters, got 'aaa"),
        ("two\nlines", "name must be 1 to 64 printable characters, got 'two"),
        (7, "name must be a str, got 7; pass a short name, such as 'train'"),
    ],
)
def test_name_that_displays_cannot_show_is_refused(name: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match="name must be") as raised:
        DataLoader(range(8), name=name)
    assert str(raised.value).startswith(words)


def test_subclass_with_its_own_name_works_as_with_torch() -> None:
    class Named(DataLoader[Any]):
        @property
        def name(self) -> Any:
            return 7

    loader = Named(range(4))
    assert [batch.item() for batch in loader] == [0, 1, 2, 3]
    assert loader.name == 7
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert "name" not in repr(loader)
