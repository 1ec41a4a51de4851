# SPDX-License-Identifier: Apache-2.0
"""Datasets of one class and length that ranks distinguish, and datasets that they take for
equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from penstock.loader.data_version import dataset_fingerprint


class Folder(Dataset[Any]):
    """Like torchvision's image folders."""

    def __init__(self, root: str, names: list[str]) -> None:
        self.samples = [(f"{root}/cats/{name}", 0) for name in names]

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class WithOwnFingerprint(Dataset[Any]):
    def __init__(self, text: str) -> None:
        self.fingerprint = text

    def __getitem__(self, index: int) -> Any:
        return index


def of_one(value: float) -> TensorDataset:
    return TensorDataset(torch.zeros(50_000, 4), torch.full((50_000,), value))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2, 3], [1, 2, 4]),
        (["a", "b"], ["a", "c"]),
        (np.arange(5), np.arange(5) + 1),
        (np.arange(5), np.arange(5.0)),
        (of_one(1.0), of_one(2.0)),
        (Folder("/data", ["1.png", "2.png"]), Folder("/data", ["1.png", "3.png"])),
        (WithOwnFingerprint("train-v1"), WithOwnFingerprint("train-v2")),
        (Subset(of_one(1.0), [1, 2]), Subset(of_one(1.0), [1, 3])),
        (Subset(of_one(1.0), [1, 2]), Subset(of_one(2.0), [1, 2])),
        (
            ConcatDataset([of_one(1.0), of_one(2.0)]),
            ConcatDataset([of_one(2.0), of_one(1.0)]),
        ),
    ],
)
def test_datasets_with_different_content_differ(one: Any, other: Any) -> None:
    first = dataset_fingerprint(one)
    assert first is not None
    assert first != dataset_fingerprint(other)
    assert first == dataset_fingerprint(one)


def test_folder_of_the_files_does_not_matter() -> None:
    names = ["1.png", "2.png"]
    here, there = Folder("/data/0", names), Folder("/local/rank-3", names)
    assert dataset_fingerprint(here) == dataset_fingerprint(there) is not None


def test_user_defined_classes_have_no_fingerprint() -> None:
    class Own(Dataset[Any]):
        rank = 3

        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            return index

    assert dataset_fingerprint(Own()) is None
    assert dataset_fingerprint(ConcatDataset([[1], Own()])) is None  # type: ignore[list-item]
    assert dataset_fingerprint([object()]) is None


def test_fingerprint_reads_a_bounded_part_of_large_data(tmp_path: Path) -> None:
    large = torch.from_file(str(tmp_path / "rows"), True, 1 << 31, dtype=torch.uint8)
    assert dataset_fingerprint(TensorDataset(large.view(-1, 1 << 10))) is not None
    assert dataset_fingerprint(range(10**12)) is not None
