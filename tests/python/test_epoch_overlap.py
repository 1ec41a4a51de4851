# SPDX-License-Identifier: Apache-2.0
"""The next epoch starts while one ends: only the clock shows it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import multiprocessing
import os
import random
import re
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from stream_oracle import describe, error_of
from torch.utils.data import Dataset, RandomSampler, TensorDataset

from penstock import DataLoader

EPOCHS = 5
LOADERS: dict[str, Any] = {"torch": torch.utils.data.DataLoader, "penstock": DataLoader}


class Augmented(Dataset[Any]):
    """Draws from each global generator of the worker."""

    def __init__(self, length: int = 25) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return (index, torch.rand(()), random.random(), float(np.random.rand()), os.getpid() > 0)


class Counting(Augmented):
    """Has a number that each sample increments."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched_count = 0

    def __getitem__(self, index: int) -> Any:
        self.fetched_count += 1
        return (*super().__getitem__(index), self.fetched_count)


class Visits(Augmented):
    """Counts how often each sample was requested, in a large object."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.array = np.zeros(5000, dtype=np.int64)
        self.tensor = torch.zeros(5000, dtype=torch.int64)
        self.list = [1000] * 100
        self.lists = [[1000] for _ in range(100)]
        self.dict = dict.fromkeys(range(100), 1000)
        self.counts = VISITS_OF[kind]

    def __getitem__(self, index: int) -> Any:
        counts = self.counts(self, index)
        counts[index] += 1
        return (index, int(counts[index]), torch.rand(()))


class _Firsts:
    """Each list's first number, by the list's index."""

    def __init__(self, lists: list[list[int]]) -> None:
        self.lists = lists

    def __getitem__(self, index: int) -> int:
        return self.lists[index][0]

    def __setitem__(self, index: int, value: int) -> None:
        self.lists[index][0] = value


class VisitsOfItsClass(Augmented):
    visits = np.zeros(5000, dtype=np.int64)

    def __getitem__(self, index: int) -> Any:
        self.visits[index] += 1
        return (index, int(self.visits[index]))


VISITS_OF: dict[str, Callable[[Visits, int], Any]] = {
    "array": lambda visits, index: visits.array,
    "tensor": lambda visits, index: visits.tensor,
    "array of a tensor": lambda visits, index: visits.tensor.numpy(),
    "list": lambda visits, index: visits.list,
    "list of lists": lambda visits, index: _Firsts(visits.lists),
    "dict": lambda visits, index: visits.dict,
}


class OwnGenerator(Augmented):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(5)

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), float(self.generator.random()))


class ReadsSharedValue(Augmented):
    """Reads the trainer's values in shared memory."""

    def __init__(self, epoch: Any) -> None:
        super().__init__()
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return (index, self.epoch.value if hasattr(self.epoch, "value") else int(self.epoch))


told_globally = multiprocessing.Value("i", 0)


class ReadsGlobalValue(Augmented):
    def __getitem__(self, index: int) -> Any:
        return (index, told_globally.value)


class Failing(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index % 7 == 3:
            raise ValueError(f"sample {index} is bad")
        return super().__getitem__(index)


class Gated(Dataset[int]):
    """Records each sample that it is asked for, then waits for a byte."""

    def __init__(self, notes: Path, reader: int) -> None:
        self.notes = notes
        self.reader = reader

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        with self.notes.open("a") as notes:
            notes.write(f"{index}\n")
        os.read(self.reader, 1)
        return index


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def options_of_own_sampler() -> dict[str, Any]:
    dataset = Augmented()
    return {"dataset": dataset, "sampler": RandomSampler(dataset, generator=own_generator())}


DATASETS: dict[str, Callable[[], dict[str, Any]]] = {
    "in sequence": lambda: {"dataset": Augmented()},
    "shuffled": lambda: {"dataset": Augmented(), "shuffle": True},
    "shuffled, own generator": lambda: {
        "dataset": Augmented(),
        "shuffle": True,
        "generator": own_generator(),
    },
    "own sampler": options_of_own_sampler,
    "drop_last": lambda: {"dataset": Augmented(), "shuffle": True, "drop_last": True},
    "whole batches": lambda: {
        "dataset": Augmented(24),
        "shuffle": True,
        "generator": own_generator(),
    },
    "short": lambda: {"dataset": Augmented(5), "shuffle": True},
    "empty": lambda: {"dataset": Augmented(0)},
    "rows": lambda: {"dataset": TensorDataset(torch.arange(50.0)), "shuffle": True},
    "failing": lambda: {"dataset": Failing(), "shuffle": True},
    "counting": lambda: {"dataset": Counting(), "shuffle": True},
    "own numbers": lambda: {"dataset": OwnGenerator(), "shuffle": True},
    **{
        f"visits in a large {kind}": lambda kind=kind: {"dataset": Visits(kind), "shuffle": True}
        for kind in VISITS_OF
    },
    "visits in an array of the class": lambda: {"dataset": VisitsOfItsClass(), "shuffle": True},
    "free order": lambda: {"dataset": Augmented(3), "in_order": False, "num_workers": 1},
    "prefetch_factor": lambda: {"dataset": Augmented(), "shuffle": True, "prefetch_factor": 5},
}


def nothing(loader: Any, epoch: int) -> None:
    pass


def draw(loader: Any, epoch: int) -> None:
    torch.rand(1)


def draw_now_and_then(loader: Any, epoch: int) -> None:
    if epoch % 2 == 1:
        torch.rand(1)
        if loader.generator is not None:
            torch.rand(1, generator=loader.generator)


def seed(loader: Any, epoch: int) -> None:
    torch.manual_seed(epoch)
    if loader.generator is not None:
        loader.generator.manual_seed(epoch)


def iterate_another(loader: Any, epoch: int) -> None:
    list(torch.utils.data.DataLoader(range(3)))


def leave_an_epoch(loader: Any, epoch: int) -> None:
    with contextlib.suppress(ValueError):
        for _ in itertools.islice(loader, 2 * epoch):
            pass


MEANWHILE = [nothing, draw, draw_now_and_then, seed, iterate_another, leave_an_epoch]


def record(
    loader_class: Any, options: dict[str, Any], meanwhile: Callable[[Any, int], None]
) -> list[Any]:
    """Every batch and error, and the trainer's generators after each epoch."""
    torch.manual_seed(9)
    random.seed(9)
    np.random.seed(9)
    defaults = {"batch_size": 3, "num_workers": 2, "persistent_workers": True}
    loader = loader_class(**{**defaults, **options})
    seen: list[Any] = []
    for epoch in range(EPOCHS):
        iterator = iter(loader)
        while True:
            try:
                seen.append(describe(next(iterator)))
            except StopIteration:
                break
            except ValueError as error:
                seen.append(str(error).partition("\n")[0])
        seen.append(generators_of(loader))
        meanwhile(loader, epoch)
        seen.append(generators_of(loader))
    return seen


def generators_of(loader: Any) -> list[str]:
    given = [] if loader.generator is None else [loader.generator]
    states = [each.get_state() for each in (torch.default_generator, *given)]
    return [hashlib.sha256(state.numpy()).hexdigest()[:8] for state in states]


@pytest.mark.sampled(15)
@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("options", DATASETS.values(), ids=DATASETS)
def test_stream_and_generators_match_torch(
    options: Callable[[], dict[str, Any]], meanwhile: Callable[[Any, int], None]
) -> None:
    expected, seen = (record(each, options(), meanwhile) for each in LOADERS.values())
    assert seen == expected


@pytest.mark.sampled(4)
@pytest.mark.parametrize("meanwhile", [nothing, draw, seed])
@pytest.mark.parametrize("options", [{}, {"generator": own_generator}, {"fetch_threads": 2}])
def test_batch_seeded_stream_matches_no_workers(
    options: dict[str, Any], meanwhile: Callable[[Any, int], None]
) -> None:
    def stream(**others: Any) -> list[Any]:
        made = {name: value() if callable(value) else value for name, value in options.items()}
        dataset = range(25) if "fetch_threads" in made else Augmented()
        given = {"dataset": dataset, "shuffle": True, "seeding": "batch", **made, **others}
        return record(DataLoader, given, meanwhile)

    expected = stream(num_workers=0, persistent_workers=False)
    assert stream() == expected
    assert stream(prefetch_bytes=1) == expected
    assert stream(overlap_epochs=False) == expected


class DrawsFromALibrary(Augmented):
    """Draws from the generator of an installed package."""

    def __getitem__(self, index: int) -> Any:
        import drawing_library

        return (index, float(drawing_library.draw()))


@pytest.mark.parametrize("meanwhile", [nothing, seed, iterate_another])
def test_generators_of_packages_draw_as_with_torch(
    meanwhile: Callable[[Any, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speculative batches that were dropped had advanced the package's generator."""
    folder = tmp_path / "site-packages" / "drawing_library"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "import numpy as np\nrng = np.random.default_rng(0)\ndef draw():\n    return rng.random()\n"
    )
    monkeypatch.syspath_prepend(str(folder.parent))
    importlib.import_module("drawing_library")
    options = {"dataset": DrawsFromALibrary(), "shuffle": True}
    expected, seen = (record(each, options, meanwhile) for each in LOADERS.values())
    assert seen == expected


def made_early(loader: DataLoader[Any], count: int) -> bool:
    """Waits until this many batches have arrived without a request from the program."""
    deadline = time.monotonic() + 20
    while loader.stats().ready < count and time.monotonic() < deadline:
        time.sleep(0.01)  # the trainer gets no notice of an arrived batch before it waits
    return loader.stats().ready == count


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("dataset", [Augmented(), TensorDataset(torch.arange(25.0))])
def test_batches_are_made_ahead_between_epochs(dataset: Any, shuffle: bool) -> None:
    loader = DataLoader(
        dataset, batch_size=3, shuffle=shuffle, num_workers=2, persistent_workers=True
    )
    count = 4 if isinstance(dataset, Augmented) else 9
    for epoch in range(3):
        for _ in loader:
            pass
        assert made_early(loader, count)
        assert loader.stats().early_batches == count * epoch
        assert loader.stats().stale_batches == 0


def test_failed_speculation_is_not_retried_until_it_would_succeed() -> None:
    loader = DataLoader(
        Augmented(), batch_size=3, shuffle=True, num_workers=2, persistent_workers=True
    )
    is_early = []
    for moves in (True, True, False, False, True, False):
        for _ in loader:
            pass
        stats = loader.stats()
        is_early.append(stats.ready + stats.outstanding > 0)
        if moves:
            torch.rand(1)
    assert is_early == [True, False, False, True, True, False]


@pytest.mark.long
def test_spawned_workers_also_start_early() -> None:
    """Their arrays are mapped, and no other process can change the contents."""
    loader = DataLoader(
        np.arange(100_000.0),  # type: ignore[arg-type]
        batch_size=25_000,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    for _ in loader:
        pass
    assert made_early(loader, 2)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "options",
    [
        {"persistent_workers": False},
        {"overlap_epochs": False},
        {"in_order": False},
        {"sampler": [3, 1, 2]},
        {"batch_size": None},
        {"dataset": Counting()},
        {"dataset": OwnGenerator()},
        {"dataset": Visits("array")},
        {"dataset": Visits("array of a tensor")},
        {"dataset": Visits("list of lists")},
    ],
    ids=lambda options: re.sub(" object at 0x[0-9a-f]*", "", str(options)),
)
def test_nothing_is_made_early_where_it_would_be_observable(options: dict[str, Any]) -> None:
    defaults = {"dataset": Augmented(), "batch_size": 3, "persistent_workers": True}
    loader = DataLoader(**{**defaults, "num_workers": 2, **options})
    for _ in range(3):
        for _ in loader:
            pass
        time.sleep(0.1)
        assert loader.stats().ready == 0


class FromNowOn:
    """Makes a dataset that reads the value its trainer shares, and returns it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.value: Any = multiprocessing.Value("i", 0)
        if kind == "shared tensor":
            self.value = torch.zeros((), dtype=torch.int64).share_memory_()
        if kind == "array":
            self.value = np.frombuffer(multiprocessing.RawArray("q", 1), dtype=np.int64).reshape(())
        if kind == "global":
            self.value = told_globally

    def dataset(self) -> Any:
        return ReadsGlobalValue() if self.kind == "global" else ReadsSharedValue(self.value)

    def say(self, loader: Any, epoch: int) -> None:
        if hasattr(self.value, "value"):
            self.value.value = epoch + 1
        else:
            self.value[...] = epoch + 1


@pytest.mark.parametrize("kind", ["value", "shared tensor", "array", "global"])
def test_values_shared_between_epochs_reach_the_workers(kind: str) -> None:
    def stream(loader_class: Any) -> list[Any]:
        said = FromNowOn(kind)
        said.say(None, -1)
        return record(loader_class, {"dataset": said.dataset()}, said.say)

    assert stream(DataLoader) == stream(torch.utils.data.DataLoader)


def fetched_with_a_discarded_epoch(notes: Path, pause: float) -> int:
    """How many samples two epochs of 8 take if a speculative one of 8 is discarded.

    ``pause`` is how many seconds the worker has to receive the news of the new epoch.
    """
    reader, writer = os.pipe()
    loader = DataLoader(
        Gated(notes, reader),
        batch_size=2,
        shuffle=True,
        num_workers=1,
        prefetch_factor=4,
        persistent_workers=True,
    )
    os.write(writer, b"." * 8)
    for _ in loader:
        pass
    deadline = time.monotonic() + 20
    while len(notes.read_text().split()) < 9 and time.monotonic() < deadline:
        time.sleep(0.01)  # until the first sample of the next epoch waits at the gate
    torch.rand(1)
    iterator = iter(loader)
    time.sleep(pause)
    os.write(writer, b"." * 16)
    indices = torch.cat(list(iterator)).tolist()
    assert sorted(indices) == list(range(8))
    asked = [int(line) for line in notes.read_text().split()]
    assert asked[-8:] == indices
    del iterator, loader
    os.close(reader)
    os.close(writer)
    return len(asked)


def test_discarded_epoch_stops_after_its_started_batches(tmp_path: Path) -> None:
    # On a busy machine a worker may be faster than the message about the new epoch.
    pauses = (0.1, 1.0, 5.0)
    counts = (fetched_with_a_discarded_epoch(tmp_path / f"notes{each}", each) for each in pauses)
    assert any(count < 24 for count in counts), "four batches were asked for, and few made in vain"


def test_worker_death_between_epochs_is_reported() -> None:
    loader = DataLoader(Augmented(), batch_size=3, num_workers=2, persistent_workers=True)
    for _ in loader:
        pass
    assert made_early(loader, 4)
    pid = loader._iterator._workers[1].pid  # type: ignore[union-attr]
    pidfd = os.pidfd_open(pid)
    message = ""
    try:
        os.kill(pid, signal.SIGKILL)
        for _ in range(3):
            list(loader)
    except RuntimeError as error:
        message = str(error)
    finally:
        os.close(pidfd)
    assert f"DataLoader worker (pid {pid}) is killed by signal: Killed" in message


def test_state_between_epochs_excludes_early_batches() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(
            Augmented(), batch_size=3, shuffle=True, num_workers=2, persistent_workers=True
        )

    torch.manual_seed(1)
    first = loader()
    for _ in first:
        pass
    assert made_early(first, 4)
    state = first.state_dict()
    expected = [batch[0].tolist() for batch in first]
    second = loader()
    second.load_state_dict(state)
    assert [batch[0].tolist() for batch in second] == expected


def large_datasets(folder: Path) -> dict[str, Any]:
    """The usual contents of datasets, each too large to be examined item by item."""
    np.save(folder / "rows.npy", np.zeros((100, 10_000)))
    paths = [(f"/data/train/{index:08d}.jpeg", index % 1000) for index in range(20_000)]
    return {
        "map": np.load(folder / "rows.npy", mmap_mode="r"),
        "array": np.zeros((100, 10_000)),
        "tensor": torch.zeros((100, 10_000)),
        "texts": paths,
        "paths": [Path(path) for path, _ in paths[:1000]],
        "tensors": [torch.zeros(10) for _ in range(5_000)],
    }


class Holding(Augmented):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def __getitem__(self, index: int) -> int:
        assert self.held[index] is not None
        return index


@pytest.mark.parametrize("kind", ["map", "array", "tensor", "texts", "paths", "tensors"])
def test_unchanged_large_datasets_start_early(kind: str, tmp_path: Path) -> None:
    loader = DataLoader(
        Holding(large_datasets(tmp_path)[kind]),
        batch_size=3,
        num_workers=2,
        persistent_workers=True,
    )
    for _ in range(2):
        for _ in loader:
            pass
        assert made_early(loader, 4)


class WritesOnRequest(Dataset[int]):
    """Waits for a byte at each sample, and writes to itself if the byte is a w."""

    def __init__(self, reader: int) -> None:
        self.reader = reader
        self.written = np.zeros(5000)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if os.read(self.reader, 1) == b"w":
            self.written[index] += 1
        return index + 10 * int(self.written[index])


def print_warnings(worker_id: int) -> None:
    """As without pytest, which collects the garbage of this process."""

    def show(message: Any, category: type[Warning], *_: Any) -> None:
        os.write(2, f"{category.__name__}: {message}\n".encode())

    warnings.showwarning = show


def epoch_after_early_writes(numbers_move: bool) -> list[int]:
    """The second epoch's samples, where its first batch was made early and wrote."""
    reader, writer = os.pipe()
    loader = DataLoader(
        WritesOnRequest(reader),
        batch_size=4,
        shuffle=True,
        num_workers=1,
        persistent_workers=True,
        worker_init_fn=print_warnings,
    )
    os.write(writer, b"....wwww")
    for _ in loader:
        pass
    assert made_early(loader, 1)
    if numbers_move:
        torch.rand(1)
        os.write(writer, b"....")
    (batch,) = list(loader)
    os.write(writer, b"....")
    del loader
    os.close(reader)
    os.close(writer)
    return sorted(batch.tolist())


def test_first_write_in_discarded_samples_causes_a_warning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert epoch_after_early_writes(numbers_move=True) == [10, 11, 12, 13]
    said = capfd.readouterr().err
    assert "PoolWarning: Samples of an epoch that never started have changed the dataset" in said
    assert "pass overlap_epochs=False" in said


def test_first_write_in_used_early_samples_causes_no_warning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert epoch_after_early_writes(numbers_move=False) == [10, 11, 12, 13]
    assert "PoolWarning" not in capfd.readouterr().err


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_overlap_epochs_must_be_a_bool(value: Any) -> None:
    error = error_of(lambda: DataLoader(range(3), overlap_epochs=value))
    assert isinstance(error, TypeError)
    assert str(error).startswith(f"overlap_epochs must be a bool, got {value!r}; pass True")


def test_assigning_overlap_epochs_takes_effect() -> None:
    loader = DataLoader(Augmented(), batch_size=3, num_workers=2, persistent_workers=True)
    for overlap_epochs in (False, True):
        loader.overlap_epochs = overlap_epochs
        for _ in loader:
            pass
        assert made_early(loader, 4 if overlap_epochs else 0)
