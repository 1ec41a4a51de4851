# SPDX-License-Identifier: Apache-2.0
"""A long-lived process: however often it repeats an action, it holds as much as at first.

Each life repeats one action, such as making a loader and dropping it. After some turns everything
is warm, and the resources of the process and its descendants are counted: memory, descriptors,
threads, processes, mappings, files of shared memory, Python objects. After many more turns they are
counted again. `make test` runs short lives and `make test-all` long ones; both print the memory
growth (`make test ARGS="tests/python/test_process_leaks.py --long -rP"`). A busy machine may not
have the time for all turns of a long life; it counts after those that it has taken.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import process_traces
import pytest
import simgpu
import torch
from device_process import run_on_new_simgpu
from pool_processes import PoolProcesses, pool_of, wait_until
from sample_datasets import Computed, Streamed
from test_job_processes import warm_of
from torch import nn
from torch.utils.data import Subset, TensorDataset

import penstock
from penstock import DataLoader, Pool, Ranks

pytestmark = pytest.mark.slow

KIB, MIB = 1 << 10, 1 << 20
HANG_S_MAX = 3600.0  # of a long life in another process
# Memory that the allocators of a process may gain between two counts, however many turns lie
# between: a leak of 400 bytes per turn is more in the long lives.
MEMORY_NOISE = 4 * MIB
# Of the turns between two counts. Two such times are less than the limit of a test
# (`faulthandler_timeout`).
TURNS_S_MAX = 100.0
SETTLE_S_MAX = 10.0
OBJECT_NOISE = 60  # Python's and torch's caches; no life has so few turns that it hides one object

Turn = Callable[[int], Any]


@dataclass(frozen=True)
class Held:
    """The resources of this process and its descendants."""

    counts: Counter[str]
    memory: Counter[str]  # anonymous, resident bytes
    objects: Counter[str]  # of the garbage collector, by type
    shared_files: frozenset[str]

    @staticmethod
    def now() -> Held:
        process_traces.join_feeder_threads()
        for _ in range(3):
            gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        objects = Counter(type(one).__name__ for one in gc.get_objects())
        counts, memory = _held_by("self", "this process")
        for pid in _below(os.getpid()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends just now
                its_counts, its_memory = _held_by(pid, "others")
                counts += its_counts
                memory += its_memory
        files = frozenset(os.listdir(process_traces.SHARED_MEMORY))
        return Held(counts, memory, objects, files)

    def since(self, before: Held) -> dict[str, Any]:
        """The counts that are higher than before."""
        more: dict[str, Any] = {
            name: f"{count} instead of {before.counts[name]}"
            for name, count in self.counts.items()
            if count > before.counts[name]
        }
        more |= {
            f"memory of {whose}": f"{size // KIB} KiB instead of {before.memory[whose] // KIB}"
            for whose, size in self.memory.items()
            if size > before.memory[whose] + MEMORY_NOISE
        }
        objects = self.objects - before.objects
        if objects.total() > OBJECT_NOISE:
            more["objects"] = objects.most_common(8)
        if files := process_traces.unused_files(self.shared_files - before.shared_files):
            more["shared files"] = files
        return more


def _below(pid: int) -> list[int]:
    direct = process_traces.children(pid)
    return [*direct, *(other for child in direct for other in _below(child))]


def _held_by(pid: int | str, whose: str) -> tuple[Counter[str], Counter[str]]:
    if pid != "self" and not process_traces.is_running(int(pid)):
        return Counter({"processes that nobody has waited for": 1}), Counter()
    [resident] = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("RssAnon:")
    ]
    counts = {
        f"processes, {whose}": 1,
        f"descriptors of {whose}": len(process_traces.descriptors(pid)),
        f"threads of {whose}": process_traces.native_threads(pid),
        f"shared mappings of {whose}": len(process_traces.shared_mappings(pid)),
    }
    return Counter(counts), Counter({whose: int(resident.split()[1]) * KIB})


def settled(before: Held) -> Held:
    """Count until only memory has grown, or until the deadline: a process closes the descriptors of
    a connection a moment after its peer has gone. A leak stays."""
    deadline = time.monotonic() + SETTLE_S_MAX
    while True:
        now = Held.now()
        is_settled = all(what.startswith("memory of") for what in now.since(before))
        if is_settled or time.monotonic() >= deadline:
            return now


def live(turn: Turn, turns: int, warm: int) -> None:
    """Take ``warm`` turns, count, take ``turns`` more or as many as there is time for, but at least
    ``warm``, and count again.

    Memory alone has a second chance. The heap of a process that has run many tests has holes, whose
    pages were returned to the system, and so have the heaps of the workers that are forked from it.
    Allocations in a hole take its pages again, once; a leak continues.
    """
    for number in range(warm):
        turn(number)
    Held.now()  # which fills caches, too
    before = Held.now()
    number = warm
    for _ in range(2):
        first, deadline = number, time.monotonic() + TURNS_S_MAX
        while number < first + turns and (number < first + warm or time.monotonic() < deadline):
            turn(number)
            number += 1
        now = settled(before)
        grown = {whose: (now.memory[whose] - size) // KIB for whose, size in before.memory.items()}
        print(f"KiB after {number - first} turns that were not there before: {grown}")
        more = now.since(before)
        if not more or not all(what.startswith("memory of") for what in more):
            break
        before = now
    assert more == {}


def lives(short: int, long: int) -> Any:
    """Both lengths of a test's life."""
    cases = [pytest.param(short, id="short"), pytest.param(long, id="long", marks=pytest.mark.long)]
    return pytest.mark.parametrize("turns", cases)


KEPT: list[Any] = []
LEAKS: dict[str, Callable[[], Any]] = {
    "memory of this process": lambda: b"x" * (2 * MIB),
    "objects": lambda: [[] for _ in range(OBJECT_NOISE)],
    "descriptors of this process": lambda: open(os.devnull),
    "shared mappings of this process": lambda: torch.ones(1).share_memory_(),
    "processes, others": lambda: subprocess.Popen(["sleep", "3600"]),
}


@pytest.mark.parametrize("what", LEAKS)
def test_each_kind_of_leak_is_detected(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What leaks here stays until the end: there is nothing to wait for.
    monkeypatch.setattr(sys.modules[__name__], "SETTLE_S_MAX", 0.0)
    with pytest.raises(AssertionError, match=what):
        live(lambda _: KEPT.append(LEAKS[what]()), turns=4, warm=2)
    for one in KEPT:
        if isinstance(one, subprocess.Popen):
            one.kill()
            one.wait()
        elif what.startswith("descriptors"):
            one.close()
    KEPT.clear()


def row(index: int) -> torch.Tensor:
    return torch.full((16,), float(index))


def shuffled_rows(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(2.0 * count).view(count, 2))


ROWS = shuffled_rows(32)
OPTIONS: dict[str, dict[str, Any]] = {
    "in process": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
    "seeded": {"num_workers": 1, "seeding": "batch", "shuffle": True, "timeout": 60},
    "threads": {"num_workers": 1, "fetch_threads": 3, "prefetch_bytes": MIB, "in_order": False},
    "rank": {"num_workers": 1, "ranks": Ranks(rank=1, world_size=2), "shuffle": True},
}


@pytest.mark.parametrize("name", OPTIONS)
@lives(300, 10_000)
def test_loaders_never_iterated_do_not_leak(name: str, turns: int) -> None:
    def turn(_: int) -> None:
        loader = DataLoader(ROWS, batch_size=4, **OPTIONS[name])
        assert len(loader) > 0 and str(loader.stats())

    live(turn, turns, warm=50)


@pytest.mark.long("*-workers", "*-threads", "*-rank")
@pytest.mark.parametrize("name", OPTIONS)
@lives(6, 1000)
def test_loaders_abandoned_mid_epoch_do_not_leak(name: str, turns: int) -> None:
    def turn(number: int) -> None:
        loader = DataLoader(ROWS, batch_size=4, **OPTIONS[name])
        batches = iter(loader)
        for _ in range(number % 5):
            next(batches)
        if number % 3 == 0:
            loader.state_dict()

    live(turn, turns, warm=6)


@pytest.mark.long("*-workers", "*-threads", "*-rank")
@pytest.mark.parametrize("name", OPTIONS)
@lives(6, 200)
def test_resumed_loaders_do_not_leak(name: str, turns: int) -> None:
    first = DataLoader(ROWS, batch_size=4, **OPTIONS[name])
    next(iter(first))
    states = [first.state_dict()]
    del first

    def turn(_: int) -> None:
        loader = DataLoader(ROWS, batch_size=4, **OPTIONS[name])
        loader.load_state_dict(states[0])
        if loader.num_workers > 0:
            loader.start_prefetch()
        taken = sum(1 for _ in loader)
        assert taken > 0
        states[0] = loader.state_dict()
        next(iter(loader))
        states[0] = loader.state_dict()

    live(turn, turns, warm=6)


class Fails(Exception):
    pass


def failing(index: int) -> torch.Tensor:
    if index % 8 == 5:
        raise Fails(index)
    return row(index)


@pytest.mark.long("*-workers", "*-threads", "*-rank")
@pytest.mark.parametrize("name", OPTIONS)
@lives(6, 200)
def test_dataset_errors_do_not_leak(name: str, turns: int) -> None:
    def turn(_: int) -> None:
        loader = DataLoader(Computed(16, failing), batch_size=4, **OPTIONS[name])
        with pytest.raises(Fails):
            list(loader)

    live(turn, turns, warm=6)


@pytest.mark.long("*-spawn")
@pytest.mark.parametrize("start", ["fork", "spawn"])
@lives(30, 200)
def test_epochs_of_persistent_workers_do_not_leak(start: str, turns: int) -> None:
    loader = DataLoader(
        Computed(64, row),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=start,
    )

    def turn(number: int) -> None:
        for at, _ in enumerate(loader):
            if number % 5 == 4 and at == 3:
                break  # and starts the next epoch

    live(turn, turns, warm=20)
    assert len(loader._iterator._workers) == 2


LONG_EPOCHS: dict[str, dict[str, Any]] = {
    "in process": {"seeding": "batch", "shuffle": True},
    "workers": {"num_workers": 2, "shuffle": True, "prefetch_factor": 4},
    "late batches": {
        "num_workers": 2,
        "in_order": False,
        "seeding": "batch",
        "fetch_threads": 2,
        "prefetch_bytes": MIB,
        "shuffle": True,
        "timeout": 60,
    },
    "seeded samples": {"num_workers": 1, "seeding": "sample", "shuffle": True},
    "rank": {
        "num_workers": 1,
        "ranks": Ranks(rank=0, world_size=2),
        "shuffle": True,
        "generator": torch.Generator(),
        "snapshot_every_n_steps": 100,
    },
    "shards": {"num_workers": 2, "seeding": "batch", "shards": 4},
    "stream": {"num_workers": 2, "persistent_workers": True},
}


EPOCH_WARM = 1000


def samples_of_epoch(turns: int, world_size: int = 1) -> int:
    """For batches of two on one rank, also where a life has its second chance."""
    return 4 * (turns + EPOCH_WARM + 100) * world_size


def run_epoch_and_count(
    loader: Any, turns: int, use: Callable[[Any], None], select: Callable[[Any], Any] | None = None
) -> None:
    """With all that a program may request from a loader in mid-epoch: states, figures, looks
    ahead."""
    batches = iter(loader)

    def turn(number: int) -> None:
        use(next(batches))
        if number % 20 == 0:
            loader.state_dict()
        if number % 50 == 0:
            assert str(loader.stats())
        if number % 50 == 25 and loader.in_order:
            assert len(loader.lookahead(3, select)) == 3

    live(turn, turns, EPOCH_WARM)


def look_at_rows(batch: torch.Tensor) -> None:
    assert batch.shape == (2, 16)


@pytest.mark.parametrize("name", LONG_EPOCHS)
@lives(2_000, 100_000)
def test_batches_of_a_long_epoch_do_not_leak(name: str, turns: int) -> None:
    ranks = LONG_EPOCHS[name].get("ranks", Ranks(rank=0, world_size=1))
    samples = samples_of_epoch(turns, ranks.world_size)
    is_stream = name in ("shards", "stream")
    dataset: Any = Computed(samples, row)
    if is_stream:
        dataset = Streamed(partial(map, row, range(samples)))
    loader: Any = DataLoader(dataset, batch_size=2, **LONG_EPOCHS[name])
    select = (lambda batch: batch[0, 0]) if is_stream else None
    run_epoch_and_count(loader, turns, look_at_rows, select)


DEVICE = "simgpu:0"
DEVICE_EPOCHS: dict[str, dict[str, Any]] = {
    "pinned": {"pin_memory": True},
    "to a device": {"device": DEVICE},
    "as the loop copies": {"device": "auto"},
}


def run_epoch_on_device(name: str, turns: int) -> None:
    def use(batch: torch.Tensor) -> None:
        look_at_rows(batch)
        assert name != "pinned" or batch.is_pinned()
        assert name != "to a device" or batch.device == torch.device(DEVICE)
        assert batch.to(DEVICE, non_blocking=True).device == torch.device(DEVICE)

    simgpu.set_copy_delay(0.0)
    try:
        loader = DataLoader(
            Computed(samples_of_epoch(turns), row),
            batch_size=2,
            shuffle=True,
            num_workers=2,
            seeding="batch",
            fetch_threads=2,
            prefetch_bytes=MIB,
            timeout=60,
            snapshot_every_n_steps=10,
            **DEVICE_EPOCHS[name],
        )
        run_epoch_and_count(loader, turns, use)
    finally:
        simgpu.set_copy_delay(0.002)


@pytest.mark.long("short-pinned", "short-as the loop copies")
@pytest.mark.parametrize("name", DEVICE_EPOCHS)
@lives(2_000, 100_000)
def test_device_batches_of_a_long_epoch_do_not_leak(name: str, turns: int) -> None:
    run_on_new_simgpu(run_epoch_on_device, name, turns, seconds_max=HANG_S_MAX)


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 2)
        self.register_buffer("mean", torch.zeros(MIB // 4))  # which a leak would show

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.net(torch.tanh(rows / 16.0)) - self.mean[0]


MOVED = ["truediv", "tanh"]


def moved(loader: Any) -> list[str]:
    assert loader.plan is not None
    return [call.operator.partition(" ")[0] for call in loader.plan.moved]


def train(model: nn.Module, loader: Any) -> None:
    for batch in loader:
        model(batch).square().sum().backward()


@lives(4, 50)
def test_offloaded_models_do_not_leak(turns: int) -> None:
    """As in folds and sweeps, and in a notebook cell that is run again."""

    def turn(_: int) -> None:
        loaders = [DataLoader(Computed(32, row), 4, num_workers=1) for _ in range(2)]
        model = penstock.offload(Features(), *loaders, cut="maximal")
        for loader in loaders:
            train(model, loader)
            assert moved(loader) == MOVED

    live(turn, turns, warm=4)


@lives(2, 20)
def test_cross_validation_folds_do_not_leak(turns: int) -> None:
    """Five folds per turn, each with a new model, one loader to train and one to validate."""
    dataset = Computed(40, row)

    def turn(_: int) -> None:
        for fold in range(5):
            held_out = range(8 * fold, 8 * fold + 8)
            parts = ([at for at in range(40) if at not in held_out], held_out)
            loaders = [DataLoader(Subset(dataset, part), 4, num_workers=1) for part in parts]
            model = penstock.offload(Features(), *loaders, cut="maximal")
            train(model, loaders[0])
            with torch.no_grad():
                for batch in loaders[1]:
                    model(batch)
            assert [moved(loader) for loader in loaders] == [MOVED, MOVED]
            penstock.detach(model)

    live(turn, turns, warm=2)


@pytest.mark.parametrize("detaches", [False, True])
@lives(4, 1000)
def test_plans_of_deleted_loaders_are_freed(detaches: bool, turns: int) -> None:
    """One model for all of them; each loader has a separate plan."""
    model: Any = Features()

    def turn(_: int) -> None:
        nonlocal model
        loader = DataLoader(Computed(32, row), 4, num_workers=1)
        model = penstock.offload(model, loader, cut="maximal")
        train(model, loader)
        assert moved(loader) == MOVED
        if detaches:
            model = penstock.detach(model)

    live(turn, turns, warm=4)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


@lives(6, 300)
def test_short_lived_trainers_do_not_leak_on_a_pool(pool: PoolProcesses, turns: int) -> None:
    """Nor to their own process. Each is another job, since its dataset is another."""
    warm = warm_of(pool.start_worker())

    def turn(number: int) -> None:
        dataset = TensorDataset(torch.arange(number, number + 40.0))
        loader = DataLoader(dataset, batch_size=4, pool=pool.endpoint, timeout=60)
        batches = iter(loader)
        for _ in range(1 + number % 5):
            [batch] = next(batches)
            assert batch.shape == (4,)
        del loader, batches
        wait_until(lambda: not process_traces.children(warm))  # its process is no longer counted

    live(turn, turns, warm=6)


@pytest.mark.long("short-True")
@pytest.mark.parametrize("trust_workers", [False, True])
@lives(2_000, 100_000)
def test_pool_batches_of_a_long_epoch_do_not_leak(
    pool: PoolProcesses, trust_workers: bool, turns: int
) -> None:
    """Nor to the pool. Trusted workers send the values that have to be unpickled."""

    def use(batch: Any) -> None:
        if trust_workers:
            assert type(batch) is deque and len(batch) == 2
        else:
            [rows] = batch
            assert rows.shape == (2,)

    pool.start_worker().served()
    loader = DataLoader(
        TensorDataset(torch.arange(float(samples_of_epoch(turns)))),
        batch_size=2,
        shuffle=True,
        collate_fn=deque if trust_workers else None,
        pool=Pool(pool.endpoint, trust_workers=trust_workers),
        timeout=60,
        snapshot_every_n_steps=10,
    )
    run_epoch_and_count(loader, turns, use)
