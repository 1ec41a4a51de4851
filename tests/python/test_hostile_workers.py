# SPDX-License-Identifier: Apache-2.0
"""Pool workers that violate the protocol: an epoch ends complete, or with an error that names the
worker.

`tests/cpp/pool_client/hostile_worker_test.cpp` has a case for each field of a worker's messages,
and `hostile_controller_test.cpp` for each field of a controller's messages.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_loader import error_of_cpp
from pool_datasets import CODE, Augmented, digests
from pool_processes import PoolProcesses, pool_of

from penstock import DataLoader, Pool
from penstock.errors import PenstockError, PoolWarning

pytestmark = pytest.mark.slow

COUNT = 40


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def pooled(pool: PoolProcesses, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(
        Augmented(COUNT),
        pool=Pool(pool.endpoint, code_paths=[CODE]),
        timeout=60,
        generator=generator,
        **options,
    )


def take_all(loader: DataLoader[Any]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PoolWarning)
        return list(loader)


def test_epoch_ended_early_by_its_only_worker_names_that_worker(
    pool: PoolProcesses,
) -> None:
    """`len(loader)` was 40, the loop ended after 7 batches, and the program ended with exit code
    0."""
    pool.start_altered_worker("end_shards_from", "7")
    loader = pooled(pool)
    batches = iter(loader)
    for _ in range(7):
        next(batches)
    words = r"(?s)in penstock worker .* at tcp://.*batch 7 of.*\(penstock drain [0-9a-f]{16}\)"
    with pytest.raises(PenstockError, match=words):
        next(batches)
    assert not loader.state_dict()["_iterator_finished"]


def test_epoch_is_complete_despite_a_worker_that_ends_it_early(pool: PoolProcesses) -> None:
    """40 batches were 19, and `state_dict()` reported that the epoch was finished."""
    pool.start_worker(processes=2)
    alone = digests(take_all(pooled(pool)))
    pool.start_altered_worker("end_shards_from", "11")
    told = (
        r"worker [0-9a-f]{16} at tcp:.* receives no more requests, because it reported the end of a"
    )
    with pytest.warns(PoolWarning, match=told) as caught:
        for _ in range(10):  # the altered worker may join too late to be asked in one epoch
            loader = pooled(pool)
            batches = iter(loader)
            seen = []
            for _ in range(COUNT):
                assert not loader.state_dict()["_iterator_finished"]
                seen.append(next(batches))
            with pytest.raises(StopIteration):
                next(batches)
            assert digests(seen) == alone
            assert loader.state_dict()["_iterator_finished"]
            del batches, loader
            if any(re.search(told, str(one.message)) for one in caught):
                break


# A worker's possible answers about the dataset of a C++ program, whose constructor asks it, and the
# words of the resulting error. Each second one is another kind of mistake.
WRONG_SHAPES: list[tuple[Any, str]] = [
    ({"iterable": False, "size": -1}, "got the size -1"),
    ({"iterable": False, "size": 2**70}, "got "),
    ({"iterable": False, "size": "23"}, "got the size '23'"),
    ({"iterable": False, "size": 1.5}, "got the size 1.5"),
    ({"iterable": True, "size": 23}, "got an iterable dataset of size 23"),
    ({"iterable": False, "size": None}, "got the size none"),
    ({"iterable": 0, "size": 23}, "got "),
    ({"iterable": False, "size": True}, "got the size"),
    ({"size": 23}, "got "),
    ({"iterable": False}, "got "),
    ([False, 23], "got "),
    (None, "got "),
]


def error_of_program(pool: PoolProcesses, timeout_s: int) -> str:
    return error_of_cpp(
        size=23,
        options={"batch_size": 4, "timeout_s": timeout_s},
        seed=3,
        pool=pool.endpoint,
        python="cpp_loader:Draws",
        arguments={"size": 23},
    )


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(WRONG_SHAPES[::2], id="each kind"),
        pytest.param(WRONG_SHAPES, id="all", marks=pytest.mark.long),
    ],
)
def test_malformed_dataset_description_is_an_error(
    pool: PoolProcesses, wrong: list[tuple[Any, str]]
) -> None:
    """The first worker's answer was taken for the length of the epoch, without a check."""
    pool.start_altered_worker("describe_datasets_as", json.dumps([shape for shape, _ in wrong]))
    for shape, words in wrong:
        said = error_of_program(pool, timeout_s=60)
        assert "must describe the dataset as a dict" in said, (shape, said)
        assert words in said, (shape, said)


def test_batches_of_another_dataset_than_described_are_errors(pool: PoolProcesses) -> None:
    pool.start_altered_worker("describe_datasets_as", json.dumps([{"iterable": False, "size": 5}]))
    said = error_of_program(pool, timeout_s=60)
    assert "its dataset has 23 samples" in said and "this epoch, has 5 samples" in said, said


@pytest.mark.parametrize("alteration", ["describe_no_dataset", "end_shards_from"])
def test_dataset_description_request_obeys_the_timeout(
    pool: PoolProcesses, alteration: str
) -> None:
    """A worker that ended a shard in place of the answer remained busy for ever."""
    pool.start_altered_worker(alteration, "0")
    said = error_of_program(pool, timeout_s=3)
    late = "no worker described the dataset within the timeout"
    wrong = "it reported the end of a shard when it was asked for"
    assert late in said or (alteration == "end_shards_from" and wrong in said), said
