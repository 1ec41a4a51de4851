# SPDX-License-Identifier: Apache-2.0
"""Workers have the kernel read the files of their next samples."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_processes import PoolProcesses
from torch.utils.data import ConcatDataset, Dataset, Subset

from penstock import _C, DataLoader, Pool, SharedList
from penstock.worker.read_ahead import ReadAhead, files_of_samples

COUNT = 12
FILE_BYTES = 3 * mmap.PAGESIZE


class Files(Dataset[Any]):
    """One file a sample, as in torchvision's folders."""

    def __init__(self, paths: list[Path]) -> None:
        self.samples = [(str(path), 0) for path in paths]
        self.imgs = self.samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(list(Path(self.samples[index][0]).read_bytes()[:8]))


class Patient(Files):
    """Its first sample waits until the file of the last one is in memory, which only advice can
    bring there."""

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            is_read = until(lambda: is_in_memory(self.samples[COUNT - 1][0]))
            return torch.tensor([int(is_read)] * 8)
        return super().__getitem__(index)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    made = []
    for index in range(COUNT):
        path = tmp_path / f"{index:02}"
        path.write_bytes(bytes([index]) * FILE_BYTES)
        forget(path)
        made.append(path)
    if is_in_memory(str(made[0])):
        pytest.skip("this file system keeps all files in memory")
    return made


def forget(path: Path) -> None:
    """Have the kernel drop a file from its memory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def is_in_memory(path: str) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(path, os.O_RDWR)
    try:
        with mmap.mmap(fd, FILE_BYTES) as content:
            start = ctypes.c_char.from_buffer(content)
            pages = (ctypes.c_ubyte * (FILE_BYTES // mmap.PAGESIZE))()
            address = ctypes.c_void_p(ctypes.addressof(start))
            assert libc.mincore(address, ctypes.c_size_t(FILE_BYTES), pages) == 0
            del start
            return all(page & 1 for page in pages)
    finally:
        os.close(fd)


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_advised_files_are_read_into_memory(paths: list[Path]) -> None:
    advisor = _C.ReadAdvisor()
    advisor.advise([str(path) for path in paths] + ["/nowhere/file", str(paths[0].parent)])
    assert until(lambda: all(is_in_memory(str(path)) for path in paths))
    assert until(lambda: advisor.checked == COUNT)
    assert advisor.cold == COUNT
    advisor.advise([str(path) for path in paths])
    assert until(lambda: advisor.checked == 2 * COUNT)
    assert advisor.cold == COUNT


def test_few_files_are_checked_while_all_are_in_memory(paths: list[Path]) -> None:
    advisor = _C.ReadAdvisor(1)
    warm = paths[0]
    warm.read_bytes()
    advisor.advise([str(warm)] * 256)
    assert until(lambda: advisor.checked == 256)
    advisor.advise([str(warm)] * 1600)
    assert until(lambda: advisor.checked == 356)

    def is_cold_file_found() -> bool:
        forget(paths[1])
        advisor.advise([str(paths[1])] * 16)  # one of them is checked
        return advisor.cold > 0

    assert until(is_cold_file_found)


def test_worker_reads_files_of_the_next_batch_ahead(paths: list[Path]) -> None:
    batches = [*DataLoader(Patient(paths), batch_size=COUNT // 2, num_workers=1)]
    assert batches[0][0].tolist() == [1] * 8
    assert batches[1][:, 0].tolist() == [*range(COUNT // 2, COUNT)]


@pytest.mark.slow
def test_worker_of_a_pool_reads_the_files_of_its_batch_ahead(
    paths: list[Path], steady_pool: PoolProcesses
) -> None:
    of_pool = Pool(steady_pool.endpoint, code_paths=[Path(__file__).parent])
    loader = DataLoader(Patient(paths), batch_size=COUNT, pool=of_pool, timeout=60)
    (batch,) = loader
    assert batch[0].tolist() == [1] * 8
    assert batch[1:, 0].tolist() == [*range(1, COUNT)]


def test_variable_switches_reading_ahead_off(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ReadAhead.of(Files(paths)) is not None
    monkeypatch.setenv("PENSTOCK_READAHEAD", "0")
    assert ReadAhead.of(Files(paths)) is None


def test_stream_is_torchs(paths: list[Path]) -> None:
    for options in ({"batch_size": 5, "shuffle": True}, {"batch_size": None}):
        streams = []
        for kind in (torch.utils.data.DataLoader, DataLoader):
            torch.manual_seed(3)
            streams.append([*kind(Files(paths), num_workers=2, **options)])  # type: ignore[arg-type]
        assert all(torch.equal(*pair) for pair in zip(*streams, strict=True))


class ListAndMask(Files):
    def __init__(self, paths: list[Path]) -> None:
        super().__init__(paths)
        self.masks = SharedList([path.with_suffix(".mask") for path in paths])
        for mask in self.masks:
            mask.write_bytes(b"mask")


def test_files_of_samples_are_found(paths: list[Path]) -> None:
    names = [str(path) for path in paths]
    files: Any = files_of_samples(Files(paths))
    assert files(3) == [names[3]]
    files = files_of_samples(Subset(Files(paths), [5, 4]))
    assert files(1) == [names[4]]
    files = files_of_samples(ConcatDataset([Files(paths[:2]), Files(paths[2:])]))
    assert [files(index) for index in (0, 1, 2, -1)] == [[names[i]] for i in (0, 1, 2, -1)]
    files = files_of_samples(ListAndMask(paths))
    assert files(2) == [names[2], f"{names[2]}.mask"]


class Listed(Files):
    """Its paths are in a property, the first items of lists."""

    def __init__(self, paths: list[Path]) -> None:
        self.rows = paths

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def files(self) -> list[list[Any]]:
        return [[path, 1] for path in self.rows if path.suffix != ".png"]


def test_files_in_a_property_and_assigned_later_are_found(paths: list[Path]) -> None:
    data = Files(paths)
    files: Any = files_of_samples(data)
    data.samples = data.imgs = data.samples[::-1]
    assert files(0) == [str(paths[-1])]
    files = files_of_samples(Listed(paths))
    assert set(files(3)) == {str(paths[3])}


@pytest.mark.parametrize(
    "dataset",
    [
        [1, 2, 3],
        torch.utils.data.TensorDataset(torch.zeros(3)),
        Files([Path("/nowhere/a"), Path("/nowhere/b")]),
        Files([]),
    ],
)
def test_datasets_without_files_have_none(dataset: Any) -> None:
    assert files_of_samples(dataset) is None
    assert ReadAhead.of(dataset) is None


def test_indices_that_are_no_samples_are_ignored(paths: list[Path]) -> None:
    ahead = ReadAhead.of(Files(paths))
    assert ahead is not None
    ahead.note([COUNT + 5])
    ahead.note("not a list of samples")
    ahead.note_upcoming([0, 1])
    ahead.note([0, 1])  # was advised
    assert until(lambda: is_in_memory(str(paths[1])))
