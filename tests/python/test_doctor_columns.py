# SPDX-License-Identifier: Apache-2.0
"""penstock doctor names the columns of a table that a program does not read."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet
from torch.utils.data import ConcatDataset, Subset, default_collate

from penstock import DataLoader
from penstock.doctor.column_reads import ColumnReads, TableWatch, _NotingDict

ROWS = 64
COLUMNS = {
    "image": [[float(row)] * 60 for row in range(ROWS)],
    "label": [*range(ROWS)],
    "caption": ["a caption of forty characters, all of them"] * ROWS,
    "meta": [b"0" * 1000] * ROWS,
}


def table() -> datasets.Dataset:
    return datasets.Dataset.from_dict(COLUMNS).with_format("torch", output_all_columns=True)


PROGRAM = """
import datasets, torch, sys
from torch.utils.data import DataLoader

if __name__ == "__main__":
    dataset = datasets.load_from_disk("table").with_format("torch")
    model = torch.nn.Linear(60, 1)
    for epoch in range(1000):
        for batch in DataLoader(dataset, 8, num_workers={workers}, shuffle=True):
            {step}
"""
STEPS = {
    "image, label": (
        "(model(batch['image']).squeeze() - batch['label']).sum()",
        ["caption", "meta"],
    ),
    "all": ("[*batch.values()]", []),
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("step", STEPS)
def test_doctor_names_the_unread_columns(tmp_path: Path, workers: int, step: str) -> None:
    datasets.Dataset.from_dict(COLUMNS).save_to_disk(tmp_path / "table")
    code, unread = STEPS[step]
    program = textwrap.dedent(PROGRAM).format(workers=workers, step=code)
    (tmp_path / "program.py").write_text(program)
    options = ["--trials", "0", "--steps", "4", "--json", "program.py"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "doctor", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["unread_columns"]
    if not unread:
        assert found is None
        return
    assert found["names"] == unread
    assert found["kept"] == ["image", "label"]
    assert f"{found['unread_share']:.2f}" == "0.68"


@pytest.fixture
def watch() -> Any:
    tables = TableWatch()
    tables.begin()
    yield tables
    tables.end()


def pick(samples: list[dict[str, Any]]) -> Any:
    return default_collate([(one["image"], one["label"]) for one in samples])


def everything(samples: list[dict[str, Any]]) -> Any:
    return [dict(one) for one in samples]


@pytest.mark.usefixtures("watch")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("collate", "unread"), [(pick, ("caption", "meta")), (everything, ()), (None, ())]
)
def test_columns_that_collate_does_not_take_are_unread(
    tmp_path: Path, num_workers: int, collate: Callable[..., Any] | None, unread: tuple[str, ...]
) -> None:
    dataset = Subset(table(), range(48))
    reads = ColumnReads.watch(dataset, tmp_path)
    assert reads is not None
    assert reads.use() is None  # before the first sample
    for _ in DataLoader(dataset, 8, num_workers=num_workers, collate_fn=collate):
        pass
    use = reads.use()
    assert use is not None
    assert use.unread == unread
    assert use.sample_bytes[3] == pytest.approx(1000, rel=0.01)


@pytest.mark.usefixtures("watch")
def test_columns_of_batches_that_a_program_does_not_take_are_unread(tmp_path: Path) -> None:
    dataset = table()
    reads = ColumnReads.watch(dataset, tmp_path)
    assert reads is not None
    for batch in DataLoader(dataset, 8):
        view = reads.batch(batch)
        assert view["label"].shape == view.get("image")[:, 0].shape
    use = reads.use()
    assert use is not None
    assert use.unread == ("caption", "meta")
    assert use.kept == ("image", "label")


@pytest.mark.usefixtures("watch")
def test_watched_dataset_has_the_samples_of_an_unwatched_one(tmp_path: Path) -> None:
    dataset, other = table(), table()
    assert ColumnReads.watch(dataset, tmp_path) is not None
    assert str(dataset[3]) == str(other[3])
    assert str(dataset[[1, 5]]) == str(other[[1, 5]])
    assert str(dataset.__getitems__([1, 5])) == str(other.__getitems__([1, 5]))
    for twin in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert str(twin[3]) == str(other[3])
        assert type(twin[3]) is dict


def test_tables_of_several_or_of_a_transform_are_not_examined(tmp_path: Path) -> None:
    both = ConcatDataset([table(), table()])
    assert ColumnReads.watch(both, tmp_path) is None
    transformed = table().with_transform(lambda rows: rows)
    assert ColumnReads.watch(transformed, tmp_path) is None
    assert ColumnReads.watch([1, 2, 3], tmp_path) is None


def takes_all(code: Callable[[dict[str, Any]], Any]) -> bool:
    taken: set[str] = set()
    code(_NotingDict({"a": 1, "b": 2, "c": 3}, taken.add))
    return taken == {"a", "b", "c"}


def test_code_that_takes_all_values_is_seen() -> None:
    assert takes_all(dict)
    assert takes_all(lambda one: {**one})
    assert takes_all(lambda one: (lambda **given: given)(**one))
    assert takes_all(lambda one: [*one.values()])
    assert takes_all(lambda one: [*one.items()])
    assert takes_all(copy.copy)
    assert takes_all(pickle.dumps)
    assert takes_all(json.dumps)
    assert takes_all(lambda one: one | {"d": 4})
    assert takes_all(lambda one: {"d": 4} | one)
    assert takes_all(lambda one: {}.update(one))
    assert takes_all(lambda one: one == {})
    for code in (len, list, bool, lambda one: "a" in one, lambda one: one["a"], repr):
        assert not takes_all(code)


def test_selected_columns_are_read_and_no_others(tmp_path: Path) -> None:
    """Of a Parquet file, by the kernel's counter of bytes that system calls read."""
    rows, path = 4096, tmp_path / "table.parquet"
    columns = {"label": [*range(rows)], "meta": [os.urandom(1024) for _ in range(rows)]}
    parquet.write_table(pyarrow.table(columns), path)
    facts = parquet.ParquetFile(path).metadata.row_group(0)
    kept_bytes, unread_bytes = (facts.column(place).total_compressed_size for place in (0, 1))
    assert unread_bytes > 4_000_000
    read_bytes, found = bytes_read(lambda: parquet.read_table(path, columns=["label"]))
    assert found.column_names == ["label"]
    footer_bytes = 1 << 16  # pyarrow reads the end of the file first, of which the footer is a part
    assert read_bytes < kept_bytes + 2 * footer_bytes
    read_bytes, _ = bytes_read(lambda: parquet.read_table(path))
    assert read_bytes > unread_bytes


def bytes_read(call: Callable[[], Any]) -> tuple[int, Any]:
    before = counted()
    result = call()
    return counted() - before, result


def counted() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])
