# SPDX-License-Identifier: Apache-2.0
"""Chunks of real files: the bytes that processes read, by the kernel's counter, and the samples."""

from __future__ import annotations

import collections
import functools
import io
import itertools
import multiprocessing
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from penstock import ChunkedDataset, ChunkSampler, DataLoader, Ranks

CHUNKS, ROWS, WIDTH = 128, 16, 8192
BATCH = 16
BYTES = multiprocessing.Value("q", 0)  # read by all processes
# Numbers that do not compress.
DATA = np.random.default_rng(0).integers(0, 256, (CHUNKS * ROWS, WIDTH), dtype=np.uint8)


class Chunks(NamedTuple):
    """The chunks of files: a reader that is picklable, and how to take a sample."""

    read: Callable[[int], Any]
    row: Callable[[Any, int], Any]
    size: int  # of the files, in bytes


def bytes_read() -> int:
    """Bytes that this process has read by system calls, by the kernel's counter."""
    text = Path("/proc/self/io").read_text()
    return int(text.splitlines()[0].removeprefix("rchar: "))


class Counted:
    def __init__(self, read: Callable[[int], Any]) -> None:
        self.read = read

    def __call__(self, number: int) -> Any:
        before = bytes_read()
        chunk = self.read(number)
        with BYTES.get_lock():
            BYTES.value += bytes_read() - before
        return chunk


def as_tensor(chunk: Any, row: int) -> torch.Tensor:
    return torch.from_numpy(np.array(chunk[row]))


OPEN: collections.defaultdict[str, list[Any]] = collections.defaultdict(list)


# Open files, by process: workers that are forked must not share one.
@functools.cache
def opened_hdf5(path: str, process_id: int) -> Any:
    file = pytest.importorskip("h5py").File(path)
    OPEN["hdf5"].append(file)
    return file


def read_hdf5(path: str, number: int) -> Any:
    images = opened_hdf5(path, os.getpid())["images"]
    return images[number * ROWS : (number + 1) * ROWS]


def hdf5(folder: Path) -> Chunks:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    path = folder / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=DATA, chunks=(ROWS, WIDTH))
    return Chunks(functools.partial(read_hdf5, str(path)), as_tensor, path.stat().st_size)


@functools.cache
def opened_zarr(path: str, process_id: int) -> Any:
    return pytest.importorskip("zarr").open_array(path, mode="r")


def read_zarr(path: str, number: int) -> Any:
    return opened_zarr(path, os.getpid())[number * ROWS : (number + 1) * ROWS]


def zarr(folder: Path) -> Chunks:
    package = pytest.importorskip("zarr", minversion="3", reason="zarr 3 is not installed")
    path = folder / "data.zarr"
    array = package.create_array(path, shape=DATA.shape, chunks=(ROWS, WIDTH), dtype=DATA.dtype)
    array[:] = DATA
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return Chunks(functools.partial(read_zarr, str(path)), as_tensor, size)


@functools.cache
def opened_parquet(path: str, process_id: int) -> Any:
    file = pytest.importorskip("pyarrow.parquet").ParquetFile(path)
    OPEN["parquet"].append(file)
    return file


def read_parquet(path: str, number: int) -> Any:
    table = opened_parquet(path, os.getpid()).read_row_group(number)
    return np.stack([np.frombuffer(row.as_buffer(), np.uint8) for row in table["image"]])


def parquet(folder: Path) -> Chunks:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pq = pytest.importorskip("pyarrow.parquet")
    path = folder / "data.parquet"
    table = arrow.table({"image": [row.tobytes() for row in DATA]})
    pq.write_table(table, path, row_group_size=ROWS, use_dictionary=False, write_statistics=False)
    assert pq.read_metadata(path).num_row_groups == CHUNKS
    return Chunks(functools.partial(read_parquet, str(path)), as_tensor, path.stat().st_size)


def tar_row(samples: list[Any], row: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(samples[row]["bin"], np.uint8).copy())


def write_shards(folder: Path) -> int:
    """Tar files as webdataset writes them: members of one sample have one stem."""
    for number in range(CHUNKS):
        with tarfile.open(folder / f"{number:06}.tar", "w") as shard:
            for row in range(number * ROWS, (number + 1) * ROWS):
                member = tarfile.TarInfo(f"{row:06}.bin")
                member.size = WIDTH
                shard.addfile(member, io.BytesIO(DATA[row].tobytes()))
    return sum(path.stat().st_size for path in folder.glob("*.tar"))


def read_tar(folder: str, number: int) -> list[Any]:
    samples: dict[str, dict[str, bytes]] = {}
    with tarfile.open(Path(folder, f"{number:06}.tar"), "r|") as shard:  # without seeking
        for member in shard:
            stem, _, kind = member.name.partition(".")
            content = shard.extractfile(member)
            assert content is not None
            samples.setdefault(stem, {})[kind] = content.read()
    return list(samples.values())


def tar(folder: Path) -> Chunks:
    size = write_shards(folder)
    return Chunks(functools.partial(read_tar, str(folder)), tar_row, size)


def read_webdataset(folder: str, number: int) -> list[Any]:
    package = pytest.importorskip("webdataset")
    shard = package.SimpleShardList([f"{folder}/{number:06}.tar"])
    return list(package.DataPipeline(shard, package.tarfile_to_samples()))


def webdataset(folder: Path) -> Chunks:
    pytest.importorskip("webdataset", reason="webdataset is not installed")
    size = write_shards(folder)
    return Chunks(functools.partial(read_webdataset, str(folder)), tar_row, size)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Chunks]:
    """Return the chunks of a format, whose files are written once."""

    @functools.cache
    def made(make: Callable[[Path], Chunks]) -> Chunks:
        return make(tmp_path_factory.mktemp(make.__name__))

    return made


@pytest.fixture(autouse=True)
def closed_files() -> Any:
    yield
    for opened, path in ((opened_hdf5, "hdf5"), (opened_parquet, "parquet")):
        for file in OPEN.pop(path, []):
            file.close()
        opened.cache_clear()
    if "zarr" in sys.modules:  # ends the thread of its event loop
        sys.modules["zarr.core.sync"].cleanup_resources()


def read_batches(batches: Any) -> tuple[list[torch.Tensor], int]:
    BYTES.value = 0
    rows = [row for batch in batches for row in batch]
    return rows, BYTES.value


def check_rows(rows: list[torch.Tensor], order: list[int]) -> None:
    assert len(rows) == len(order)
    assert torch.equal(torch.stack(rows), torch.from_numpy(DATA[order]))


@pytest.mark.parametrize(
    ("make", "workers"),
    [(hdf5, 0), (hdf5, 1), (hdf5, 4), (zarr, 2), (parquet, 4), (tar, 2), (webdataset, 2)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_epoch_reads_the_file_once(make: Any, workers: int, files: Any) -> None:
    chunks = files(make)
    lengths = [ROWS] * CHUNKS
    sampler = ChunkSampler(lengths, 8, readers=4, batch_size=BATCH)
    dataset = ChunkedDataset(
        lengths, Counted(chunks.read), chunks_in_memory=8 * 4 // max(1, workers), row=chunks.row
    )
    rows, read = read_batches(
        DataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=workers)
    )
    sampler.set_epoch(0)
    check_rows(rows, list(sampler))
    assert 0.9 <= read / chunks.size <= 1.05


@pytest.mark.parametrize("make", [hdf5, zarr, parquet, tar], ids=lambda make: make.__name__)
def test_a_shuffle_reads_the_file_many_times(make: Any, files: Any) -> None:
    chunks = files(make)
    dataset = ChunkedDataset(
        [ROWS] * CHUNKS, Counted(chunks.read), chunks_in_memory=8, row=chunks.row
    )
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
    rows, read = read_batches(itertools.islice(loader, 32))
    assert read > 10 * sum(row.nbytes for row in rows)


def test_ranks_with_workers_read_the_file_once_together(files: Any) -> None:
    chunks = files(parquet)
    lengths = [ROWS] * CHUNKS
    total = 0
    given: list[torch.Tensor] = []
    for rank in range(2):
        loader = DataLoader(
            ChunkedDataset(lengths, Counted(chunks.read), chunks_in_memory=8, row=chunks.row),
            batch_size=BATCH,
            sampler=ChunkSampler(lengths, 8, readers=4, batch_size=BATCH),
            ranks=Ranks(rank=rank, world_size=2),
            num_workers=2,
        )
        rows, read = read_batches(loader)
        given += rows
        total += read
    assert 0.9 <= total / chunks.size <= 1.05
    found = torch.stack(given)
    assert sorted(map(bytes, found.numpy())) == sorted(map(bytes, DATA))
