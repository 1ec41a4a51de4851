# SPDX-License-Identifier: Apache-2.0
"""`penstock.cached()`: samples from memory and disk equal the dataset's samples."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
import signal
import sqlite3
import subprocess
import time
import warnings
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset
from torch.utils.data import DataLoader as TorchLoader

import penstock
from penstock import DataLoader, cached
from penstock.caching import cached_dataset
from penstock.loader.data_version import dataset_fingerprint
from penstock.tuning import byte_sizes

SAMPLE_BYTES = 4 * 1024


class Counted(Dataset[Any]):
    """Samples that follow from their index; counts its calls, also in workers."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.calls = torch.zeros(count, dtype=torch.int64).share_memory_()
        self.fingerprint = f"counted {count}"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.calls[index] += 1
        values = torch.arange(SAMPLE_BYTES // 4, dtype=torch.int32) * (index + 1)
        return {"values": values, "index": index, "name": f"sample {index}"}


class Augmented(Dataset[Any]):
    """Draws from the global generators after its samples are made."""

    def __init__(self, samples: Any) -> None:
        self.samples_of = samples

    def __len__(self) -> int:
        return len(self.samples_of)

    def __getitem__(self, index: int) -> Any:
        sample = self.samples_of[index]
        sample["values"] += torch.randint(100, (1,)).int() + random.randrange(100)
        sample["noise"] = np.random.rand()
        return sample


def stored_bytes() -> int:
    """Return the bytes of one sample in a budget."""
    probe = cached(Counted(1), memory="1MB")
    probe[0]
    return -(-probe.stats().bytes // 64) * 64


def bits_of(value: Any) -> Any:
    """All properties of a sample or a batch that a program can read, for comparison."""
    if isinstance(value, torch.Tensor):
        kind = value.dtype, value.shape, value.stride()
        return type(value), kind, value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return dict, [(key, bits_of(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [bits_of(part) for part in value]
    return type(value), value


def epochs(loader: Any, count: int) -> list[Any]:
    return [[bits_of(batch) for batch in loader] for _ in range(count)]


# ---- Hits


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("workers", [0, 2])
def test_hits_are_the_share_of_the_budget_to_the_sample(share: float, workers: int) -> None:
    count, held = 40, round(40 * share)
    data = Counted(count)
    samples = cached(data, memory=max(64, held * stored_bytes()))
    loader = DataLoader(samples, batch_size=4, shuffle=True, num_workers=workers)
    for epoch in range(3):
        assert sorted(i for batch in loader for i in batch["index"].tolist()) == list(range(count))
        stats = samples.stats()
        assert stats.entries == held
        assert stats.hits == epoch * held
        assert stats.misses == count + epoch * (count - held)
    assert stats.hit_bytes == 2 * stats.bytes
    assert data.calls.sum() == stats.misses + stats.compared


@pytest.mark.long("forkserver")
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "fetch_threads": 3},
        {"num_workers": 2, "seeding": "batch"},
        {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"},
        {"num_workers": 1, "multiprocessing_context": "forkserver"},
    ],
    ids=["persistent", "threads", "batch", "spawn", "forkserver"],
)
def test_workers_share_one_memory(options: Any) -> None:
    samples = cached(Counted(24), memory="1MB")
    loader = DataLoader(samples, batch_size=4, shuffle=True, **options)
    for epoch in range(3):
        for batch in loader:
            expected = torch.arange(SAMPLE_BYTES // 4)[None] * (batch["index"][:, None] + 1)
            assert torch.equal(batch["values"], expected.int())
        assert samples.stats().hits == epoch * 24
    assert samples.stats().misses == samples.stats().entries == 24
    assert samples[3]["name"] == "sample 3" and samples.stats().hits == 49


@pytest.mark.slow
@pytest.mark.parametrize("seeding", ["worker", "batch", "sample"])
def test_stream_and_state_are_the_same_without_the_cache(seeding: str) -> None:
    def run(data: Any) -> tuple[Any, ...]:
        torch.manual_seed(3), random.seed(4), np.random.seed(5)
        loader = DataLoader(
            Augmented(data), batch_size=4, shuffle=True, num_workers=2, seeding=seeding
        )
        batches, states = [], []
        for _ in range(3):
            for batch in loader:
                batches.append(bits_of(batch))
                states.append(loader.state_dict())
        return batches, states, torch.get_rng_state().tolist(), random.getstate()

    half = 10 * stored_bytes()
    assert run(cached(Counted(20), memory=half)) == run(Counted(20))


def test_global_generators_are_left_as_without_the_cache() -> None:
    def run(data: Any) -> tuple[Any, ...]:
        torch.manual_seed(1), random.seed(2), np.random.seed(3)
        loader = DataLoader(Augmented(data), batch_size=4, shuffle=True)
        batches = epochs(loader, 3)
        numpy_state = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
        return batches, torch.get_rng_state().tolist(), random.getstate(), numpy_state

    assert run(cached(Counted(12), memory="1MB")) == run(Counted(12))


def test_torch_loader_gets_the_same_batches() -> None:
    samples = cached(Counted(8), memory="1MB")
    for _ in range(2):
        ours, theirs = TorchLoader(samples, 4), TorchLoader(Counted(8), 4)
        for batch, expected in zip(ours, theirs, strict=True):
            assert bits_of(batch) == bits_of(expected)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_loader_stats_add_up_the_caches_of_its_dataset(workers: int) -> None:
    one, other = (cached(Counted(count), memory="1MB") for count in (12, 8))
    joined = Augmented(ConcatDataset([one, Subset(other, range(8))]))
    loader = DataLoader(joined, batch_size=4, num_workers=workers)
    for _ in range(3):
        list(loader)
    cache = loader.stats().cache
    assert cache is not None
    assert (cache.hits, cache.misses, cache.entries) == (40, 20, 20)
    assert cache.hit_bytes == one.stats().hit_bytes + other.stats().hit_bytes
    text = "of 60 samples, 40 were read from a cache in memory, 0 from disk, and 20 were made"
    assert text in str(loader.stats()) and text in str(loader.report())
    assert loader.report().cache == cache
    assert DataLoader(Augmented(Counted(4))).stats().cache is None


# ---- Samples


Pair = namedtuple("Pair", "first second")


class Custom:
    def __init__(self, value: Any) -> None:
        self.value = value


def various_samples() -> list[Any]:
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tensor = torch.arange(24.0).reshape(2, 3, 4)
    shared = torch.ones(3)
    return [
        tensor, tensor.permute(2, 0, 1), tensor[:, ::2], tensor[:, 1], tensor[1:1],
        torch.tensor(3.5), torch.ones(1).expand(5), torch.zeros(0), tensor.bool(),
        tensor.bfloat16(), tensor.to(torch.complex64), torch.nn.Parameter(tensor),
        torch.tensor([1.0, float("nan"), -0.0]), torch.eye(3).to_sparse(), [shared, shared],
        base, base.transpose(2, 0, 1), base[:, :, ::-1], base[:, ::2], np.asfortranarray(base),
        base.astype(">f4"), np.array(["a", "bc"]), np.array([], np.int8), np.float32(2.5),
        np.broadcast_to(np.float32(1.0), (3,)), np.array([{"a": 1}, None], dtype=object),
        None, True, 7, 1 << 70, 2.5, "text", "\ud800", b"bytes", (), [], {}, {1, 2}, 1 + 2j,
        Pair(tensor, "b"), OrderedDict(b=1, a=2), (1, [2, {"a": (3, None)}]), bytearray(b"ab"),
        Custom([tensor, base]),
    ]  # fmt: skip


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
        assert one.requires_grad == other.requires_grad
        if one.layout is torch.strided:
            assert one.stride() == other.stride()
            one, other = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other))
        else:
            one, other = one.to_dense(), other.to_dense()
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.strides == other.strides or one.size == 0
        assert one.flags.writeable == other.flags.writeable
        assert one.tolist() == other.tolist()
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    elif isinstance(one, dict):
        assert_equal(list(one.items()), list(other.items()))
    elif isinstance(one, Custom):
        assert_equal(one.value, other.value)
    else:
        assert one == other and repr(one) == repr(other)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_hits_are_equal_in_type_dtype_strides_and_bits(where: str, tmp_path: Path) -> None:
    wanted: Any = various_samples()
    budget: Any = {"memory": "1MB"} if where == "memory" else {"disk": (tmp_path, "10MB")}
    samples = cached(wanted, version="1", **budget)
    for _ in range(3):
        for index in range(len(wanted)):
            assert_equal(samples[index], wanted[index])
    stats = samples.stats()
    assert (stats.hits if where == "memory" else stats.disk_hits) == 2 * len(wanted)


def test_images_are_equal() -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.RandomState(0).randint(256, size=(5, 7, 3), dtype=np.uint8)
    wanted: Any = [image.fromarray(pixels), image.fromarray(pixels).convert("P")]
    samples = cached(wanted, memory="1MB")
    for index, expected in enumerate(wanted * 2):
        found = samples[index % 2]
        assert (type(found), found.mode, found.size) == (image.Image, expected.mode, (7, 5))
        assert found.tobytes() == expected.tobytes()
        assert found.getpalette() == expected.getpalette()
    assert samples.stats().hits == 2


def test_a_hit_may_be_changed() -> None:
    samples = cached(Counted(2), memory="1MB")
    samples[1]
    first, second = samples[1], samples[1]
    first["values"].zero_()
    first["values"].resize_(0)
    first["extra"] = 1
    assert torch.equal(second["values"], samples[1]["values"]) and "extra" not in samples[1]
    assert second["values"].sum() > 0


def test_same_objects_stay_the_same() -> None:
    shared = [torch.ones(2)]
    samples = cached([[shared, shared]], memory="1MB")  # type: ignore[arg-type]
    for _ in range(2):
        one, other = samples[0]  # type: ignore[misc]
        assert one is other


def test_samples_that_cannot_be_kept_are_an_error() -> None:
    samples = cached([1, lambda: 2], memory="1MB")  # type: ignore[arg-type]
    assert samples[0] == 1
    with pytest.raises(TypeError, match="must be picklable and on the CPU, got one at 1 of list"):
        samples[1]
    meta = cached([torch.ones(2, device="meta")], memory="1MB")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a tensor on meta cannot be stored"):
        meta[0]


def test_errors_of_the_dataset_are_its_own() -> None:
    samples = cached([1, 2], memory="1MB")  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(IndexError, match="list index out of range"):
            samples[2]
        assert samples[-1] == 2, "other indices are passed on"
        assert samples[np.int64(1)] == 2
    assert samples.stats().entries == 1


class Whole(Dataset[Any]):
    """Fetches whole batches."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        raise AssertionError("batches are fetched as a whole")

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.asked.append(list(indices))
        return [index * 10 for index in indices]


def test_whole_batches_fetch_what_is_missing() -> None:
    data = Whole()
    samples = cached(data, memory="1MB")
    assert samples.__getitems__([1, 2]) == [10, 20]
    assert data.asked == [[1, 2], [1, 2]], "the first ones are made twice"
    assert samples.__getitems__([2, 5, 1]) == [20, 50, 10]
    assert data.asked[2:] == [[5], [5]]
    assert [batch.tolist() for batch in DataLoader(samples, batch_size=4)] == [
        [0, 10, 20, 30], [40, 50, 60, 70],
    ]  # fmt: skip
    assert not hasattr(cached(Counted(1), memory="1MB"), "__getitems__")


def test_attributes_and_fingerprint_are_those_of_the_dataset() -> None:
    data = TensorDataset(torch.arange(6))
    samples = cached(Subset(data, [1, 2]), memory="1MB")
    assert samples.indices == [1, 2] and len(samples) == 2
    assert dataset_fingerprint(samples) == dataset_fingerprint(samples.cached_dataset) is not None
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        samples.missing  # noqa: B018
    assert repr(samples) == "<Subset cached in 1,000,000 bytes of memory>"


def test_a_pickled_copy_starts_empty() -> None:
    samples = cached(Counted(4), memory="1MB")
    samples[0]
    for copied in (pickle.loads(pickle.dumps(samples)), copy.deepcopy(samples)):
        assert copied.stats().entries == 0 and copied.stats().budget_bytes == 1_000_000
        assert copied[0]["name"] == "sample 0" and copied.stats().entries == 1
    assert samples.stats().entries == 1


# ---- Random samples


class DrawsIn(Dataset[Any]):
    """Draws at odd indices."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.own: Any = {
            "own numpy": np.random.default_rng(1),
            "own legacy": np.random.RandomState(1),
            "own torch": torch.Generator(),
            "own random": random.Random(1),
        }
        self.fresh = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index % 2 == 0:
            return index
        if self.how == "torch":
            return torch.rand(1).item()
        if self.how == "random":
            return random.random()
        if self.how == "numpy":
            return np.random.rand()
        if self.how == "own torch":
            return torch.rand(1, generator=self.own[self.how]).item()
        return (
            self.own[self.how].random() if "legacy" not in self.how else self.own[self.how].rand()
        )


WAYS = ["torch", "random", "numpy", "own torch", "own numpy", "own legacy", "own random"]


@pytest.mark.parametrize("how", WAYS)
def test_samples_that_draw_are_not_cached(how: str) -> None:
    def run(data: Any) -> Any:
        torch.manual_seed(1), random.seed(2), np.random.seed(3)
        return [data[index] for _ in range(3) for index in range(8)], torch.get_rng_state().tolist()

    expected = run(DrawsIn(how))
    samples = cached(DrawsIn(how), memory="1MB")
    with pytest.warns(UserWarning, match="Sample 1 of DrawsIn drew random numbers") as warned:
        assert run(samples) == expected
    assert len(warned) == 1
    stats = samples.stats()
    assert (stats.random, stats.entries, stats.hits, stats.misses) == (4, 4, 8, 16)


class Unsteady(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> bytes:
        return os.urandom(8)


def test_samples_that_differ_when_made_again_are_not_cached(tmp_path: Path) -> None:
    samples = cached(Unsteady(), memory="1MB", disk=(tmp_path, "1MB"), version="1")
    with pytest.warns(UserWarning, match="Sample 2 of Unsteady was made twice with different"):
        first = samples[2]
    assert len({first, samples[2], samples[2]}) == 3
    stats = samples.stats()
    assert (stats.random, stats.entries, stats.hits, stats.disk_hits) == (4, 0, 0, 0)


@pytest.mark.slow
def test_a_worker_warns_of_random_samples(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest records warnings, also in forked workers.
    monkeypatch.setattr(
        warnings, "showwarning", lambda text, *rest: os.write(2, f"{text}".encode())
    )
    samples = cached(DrawsIn("torch"), memory="1MB")
    loader = DataLoader(samples, batch_size=2, num_workers=2)
    for _ in range(2):
        list(loader)
    assert capfd.readouterr().err.count("drew random numbers") == 1
    assert samples.stats().random == 4


def test_draws_of_other_threads_keep_a_sample_out() -> None:
    data = Augmented(cached(Counted(30), memory="1MB"))
    loader = DataLoader(data, batch_size=10, fetch_threads=4)
    for _ in range(3):
        for batch in loader:
            assert batch["name"] == [f"sample {index}" for index in batch["index"].tolist()]
    stats = data.samples_of.stats()
    assert stats.random == 0
    assert stats.entries + stats.uncertain >= 30


# ---- Damage


def slab_of(samples: Any) -> tuple[int, int]:
    """The descriptor of the memory, and where the bytes of samples start in it."""
    fd = samples._store.native.fd
    return fd, os.fstat(fd).st_size - -(-samples._memory_bytes // 4096) * 4096


def test_flipped_bits_in_memory_are_found() -> None:
    data = Counted(20)
    samples = cached(data, memory=20 * stored_bytes())
    expected = [bits_of(samples[index]) for index in range(20)]
    fd, first = slab_of(samples)
    size = os.fstat(fd).st_size - first
    bits = random.Random(1)
    for _ in range(200):
        place = first + bits.randrange(size)
        byte = os.pread(fd, 1, place)[0]
        os.pwrite(fd, bytes([byte ^ 1 << bits.randrange(8)]), place)
        index = (place - first) // stored_bytes() % 20
        assert bits_of(samples[index]) == expected[index]
    assert samples.stats().damaged > 150, "bits between samples do not count"
    assert samples.stats().entries == 20


def test_flipped_bits_in_the_table_are_found() -> None:
    samples = cached(Counted(20), memory=20 * stored_bytes())
    expected = [bits_of(samples[index]) for index in range(20)]
    fd, first = slab_of(samples)
    table = first - 20 * 32 - 4096
    bits = random.Random(2)
    for _ in range(500):
        place = table + bits.randrange(20 * 32 + 4096)
        os.pwrite(fd, bytes([os.pread(fd, 1, place)[0] ^ 1 << bits.randrange(8)]), place)
        index = bits.randrange(20)
        assert bits_of(samples[index]) == expected[index]


class Slow(Counted):
    """Takes long enough to be killed while its samples are written."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.pids = torch.zeros(count, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        sample["values"] = sample["values"].repeat(25)
        self.pids[index] = os.getpid()
        return sample


@pytest.mark.slow
def test_killed_writers_leave_right_samples() -> None:
    times = random.Random(1)
    expected = [bits_of(Slow(32)[index]) for index in range(32)]
    for _ in range(8):
        samples = cached(Slow(32), memory="100MB")
        child = os.fork()
        if child == 0:
            for index in range(32):
                samples[index]
            os._exit(0)
        deadline = time.monotonic() + 20
        made = times.randrange(1, 20)
        while samples.stats().misses < made and time.monotonic() < deadline:
            time.sleep(0.0002)
        time.sleep(0.001 * times.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert [bits_of(samples[index]) for index in range(32)] == expected
        assert [bits_of(samples[index]) for index in range(32)] == expected
        stats = samples.stats()
        assert stats.entries == 32, "what a killed writer had claimed was stored by another"
        assert (stats.damaged, stats.hits + stats.misses >= 64) == (0, True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*was killed by SIGKILL")
def test_killed_workers_leave_right_samples() -> None:
    data = Slow(64)
    samples = cached(data, memory="100MB")
    loader = DataLoader(samples, batch_size=4, shuffle=True, num_workers=2, seeding="batch")
    for epoch in range(4):
        seen = []
        for number, batch in enumerate(loader):
            seen += batch["index"].tolist()
            if number == 1 and epoch == 0:
                os.kill(int(data.pids.max()), signal.SIGKILL)
        assert sorted(seen) == list(range(64))
    for index in range(64):
        assert bits_of(samples[index]) == bits_of(Slow(64)[index])
    assert samples.stats().damaged == 0 and samples.stats().entries == 64


def test_memory_is_freed_and_has_no_name() -> None:
    def count() -> int:
        links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
        return sum("penstock-samples" in os.readlink(one) for one in links if os.path.islink(one))

    before, files = count(), set(os.listdir("/dev/shm"))
    samples = cached(Slow(4), memory="1MB")
    samples[0]
    assert count() == before + 1
    assert not any("samples" in name for name in set(os.listdir("/dev/shm")) - files)
    del samples
    assert count() == before


# ---- Disk


def start(disk: Path, count: int, epochs: int = 1, memory: Any = None) -> tuple[int, int]:
    """Read all samples in another process. Return its pid, and a pipe with its statistics."""
    reader, writer = os.pipe()
    child = os.fork()
    if child > 0:
        os.close(writer)
        return child, reader
    try:
        samples = cached(Counted(count), disk=(disk, "20MB"), memory=memory)
        for _ in range(epochs):
            for index in range(count):
                assert bits_of(samples[index]) == bits_of(Counted(count)[index])
        stats = samples.stats()
        os.write(writer, f"{stats.misses} {stats.disk_hits} {stats.hits}".encode())
    finally:
        os._exit(0)


def counts(run: tuple[int, int]) -> list[int]:
    os.waitpid(run[0], 0)
    with open(run[1], "rb") as pipe:
        return [int(number) for number in pipe.read().split()]


def test_a_later_run_reads_the_disk(tmp_path: Path) -> None:
    disk = tmp_path / "cache"
    assert counts(start(disk, 20)) == [20, 0, 0]
    assert disk.stat().st_mode & 0o777 == 0o700
    assert counts(start(disk, 20, memory="1MB", epochs=3)) == [0, 20, 40]


@pytest.mark.slow
def test_two_programs_share_a_folder(tmp_path: Path) -> None:
    runs = [start(tmp_path, 100, epochs=3) for _ in range(3)]
    for misses, disk_hits, _ in map(counts, runs):
        assert misses + disk_hits == 300 and misses <= 100
    assert counts(start(tmp_path, 100)) == [0, 100, 0]


@pytest.mark.slow
def test_killed_program_leaves_a_right_disk(tmp_path: Path) -> None:
    for delay in range(8):
        child, pipe = start(tmp_path, 100)
        time.sleep(0.02 * delay)
        os.kill(child, signal.SIGKILL)
        counts((child, pipe))
    misses, disk_hits, _ = counts(start(tmp_path, 100))
    assert misses + disk_hits == 100 and disk_hits > 0


@pytest.mark.slow
def test_workers_write_to_disk_up_to_the_budget(tmp_path: Path) -> None:
    samples = cached(Counted(200), disk=(tmp_path, "500kB"))
    loader = DataLoader(samples, batch_size=4, shuffle=True, num_workers=2)
    list(loader)
    held = samples.stats().disk_entries
    assert 25 <= held <= 125
    for epoch in range(2):
        seen = [index for batch in loader for index in batch["index"].tolist()]
        assert sorted(seen) == list(range(200))
        assert samples.stats().disk_hits == (epoch + 1) * held
    assert (tmp_path / "samples.sqlite").stat().st_size <= 500_000


def test_flipped_bits_on_disk_are_found(tmp_path: Path) -> None:
    samples = cached(Counted(20), disk=(tmp_path, "10MB"))
    expected = [bits_of(samples[index]) for index in range(20)]
    del samples
    path = tmp_path / "samples.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = path.read_bytes()
    needle = (torch.arange(16, dtype=torch.int32) * 6).numpy().tobytes()
    place = content.index(needle) + 40
    path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
    again = cached(Counted(20), disk=(tmp_path, "10MB"))
    for _ in range(2):
        assert [bits_of(again[index]) for index in range(20)] == expected
    stats = again.stats()
    assert (stats.damaged, stats.misses, stats.disk_hits) == (1, 1, 39)


def test_damaged_database_is_not_used_further(tmp_path: Path) -> None:
    samples = cached(Counted(20), disk=(tmp_path, "10MB"))
    expected = [bits_of(samples[index]) for index in range(20)]
    del samples
    path = tmp_path / "samples.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(path.read_bytes())
    for page in range(3, len(content) // 16384):
        content[page * 16384 : page * 16384 + 64] = bytes(64)
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="no longer used in this process.*delete the folder"):
        again = cached(Counted(20), disk=(tmp_path, "10MB"))
        for _ in range(2):
            assert [bits_of(again[index]) for index in range(20)] == expected
    path.write_bytes(b"something else" * 1000)
    with pytest.raises(ValueError, match="is damaged or not a database"):
        cached(Counted(20), disk=(tmp_path, "10MB"))


class Files(Dataset[Any]):
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> bytes:
        return self.paths[index].read_bytes()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_changed_source_file_is_read_again(where: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.txt" for name in "abc"]
    for path in paths:
        path.write_text(path.name)
    budget: Any = {"memory": "1MB"} if where == "memory" else {"disk": (tmp_path / "c", "9MB")}
    samples = cached(Subset(Files(paths), [2, 1, 0]), version="1", **budget)
    for _ in range(2):
        assert [samples[index] for index in range(3)] == [b"c.txt", b"b.txt", b"a.txt"]
    paths[1].write_text("other")
    os.utime(paths[2], ns=(1, 1))
    for _ in range(2):
        assert [samples[index] for index in range(3)] == [b"c.txt", b"other", b"a.txt"]
    stats = samples.stats()
    assert stats.misses == 5 and stats.hits + stats.disk_hits == 7
    paths[0].unlink()
    with pytest.raises(FileNotFoundError):
        samples[2]


def test_changed_dataset_or_version_reads_nothing_of_the_other(tmp_path: Path) -> None:
    def misses(data: Any, version: str | None = None) -> int:
        samples = cached(data, disk=(tmp_path, "20MB"), version=version)
        for index in range(len(data)):
            samples[index]
        return samples.stats().misses

    one, other = TensorDataset(torch.arange(9)), TensorDataset(torch.arange(9) + 1)
    assert [misses(one), misses(one), misses(other), misses(one, "2"), misses(one)] == [
        9,
        0,
        9,
        9,
        0,
    ]
    with pytest.raises(ValueError, match="version must be given to keep samples of Unsteady on d"):
        cached(Unsteady(), disk=(tmp_path, "20MB"))


class Scaled(Counted):
    def __init__(self, count: int, scale: int) -> None:
        super().__init__(count)
        self.scale = scale

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)["values"] * self.scale


def test_changed_code_is_found(tmp_path: Path) -> None:
    samples = cached(Scaled(10, 1), disk=(tmp_path, "20MB"))
    for index in range(0, 10, 3):
        samples[index]
    again = cached(Scaled(10, 1), disk=(tmp_path, "20MB"))
    assert again[3].sum() == samples[3].sum() and again.stats().disk_hits == 1
    with pytest.warns(UserWarning, match="Sample 0 of Scaled differs .* Pass another version="):
        other = cached(Scaled(10, 2), disk=(tmp_path, "20MB"))
    assert torch.equal(other[3], Scaled(10, 2)[3])
    assert (other.stats().disk_hits, other.stats().misses) == (0, 1)


def test_budget_of_unused_datasets_is_taken_back(tmp_path: Path) -> None:
    first = cached(Counted(120), disk=(tmp_path, "500kB"))
    for index in range(120):
        first[index]
    held = first.stats().disk_entries
    second = cached(Counted(121), disk=(tmp_path, "500kB"))
    for index in range(121):
        second[index]
    assert second.stats().disk_entries < 10, "the first one is in use"
    del first, second
    third = cached(Counted(122), disk=(tmp_path, "500kB"))
    for index in range(122):
        third[index]
    assert third.stats().disk_entries >= held - 2


@pytest.mark.slow
def test_full_disk_is_survived(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("a full disk needs the right to mount one")
    try:
        samples = cached(Counted(400), disk=(mount / "cache", "1GB"))
        with pytest.warns(UserWarning, match="is full, so the cache of Counted takes no more"):
            for _ in range(2):
                for index in range(400):
                    assert samples[index]["name"] == f"sample {index}"
        stats = samples.stats()
        assert 0 < stats.disk_entries == stats.disk_hits < 400
        del samples
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("files of another user can be made by root alone")
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(
        PermissionError, match="must be a folder of this user, got .* of user 12345"
    ):
        cached(Counted(2), disk=(tmp_path, "1MB"))
    os.chown(tmp_path, 0, -1)
    (tmp_path / "samples.sqlite").touch()
    os.chown(tmp_path / "samples.sqlite", 12345, -1)
    with pytest.raises(PermissionError, match="of user 12345"):
        cached(Counted(2), disk=(tmp_path, "1MB"))


def test_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match=r"with mode 777.*chmod go-w"):
        cached(Counted(2), disk=(tmp_path, "1MB"))


# ---- Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "memory or disk must be given, got neither"),
        ({"memory": 0}, 'memory must be a number of bytes > 0 or a text such as "2GB"'),
        ({"memory": "2 apples"}, "got '2 apples'"),
        ({"memory": "1.5"}, "got '1.5'"),
        ({"memory": True}, "got True"),
        ({"memory": 1 << 60}, "memory must be at most the .* bytes that are free"),
        ({"disk": "/nvme/cache"}, "disk must be a folder and a budget"),
        ({"disk": "/nvme/cache:lots"}, "the budget in disk must be a number of bytes"),
        ({"disk": ("/nvme",)}, "disk must be a folder and a budget"),
        ({"disk": ("/nvme", "1GB"), "version": 3}, "version must be a text or None, got 3"),
        ({"disk": (__file__, "1GB")}, "disk must be a folder, got the file"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cached(Counted(4), **arguments)


class WithGenerator(Counted):
    def __getitem__(self, index: int, generator: Any = None) -> Any:
        return 1


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Stream(), "dataset must be map-style.*got Stream"),
        (WithGenerator(2), "takes a generator for random numbers"),
    ],
)
def test_bad_datasets_are_refused(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cached(data, memory="1MB")


def test_memory_of_the_cgroup_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_dataset, "memory_left_bytes", lambda: 5_000_000)
    cached(Counted(4), memory="5MB")
    with pytest.raises(ValueError, match="at most the 5,000,000 bytes .* got 6,000,000"):
        cached(Counted(4), memory="6MB")


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GB", 2 * 10**9), ("1.5 MiB", 3 << 19), ("10", 10), ("3kb", 3000), (7, 7), ("1T", 10**12)],
)
def test_sizes_are_understood(text: Any, count: int) -> None:
    assert byte_sizes.checked_bytes("memory", text) == count


def test_a_cached_dataset_is_made_by_the_function() -> None:
    with pytest.raises(TypeError, match=r"is made by penstock.cached\(dataset, memory=...\)"):
        penstock.CachedDataset()
