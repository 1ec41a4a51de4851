# SPDX-License-Identifier: Apache-2.0
"""No room for arenas, few descriptors, dead workers: batches arrive, or a clear error."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import process_traces
import pytest
import torch
from sample_datasets import Computed, number
from script_runs import BY_FORK
from stream_oracle import describe, error_of, next_error, without_frames
from torch.utils.data import TensorDataset

from penstock import DataLoader
from penstock.errors import SharedMemoryError


def row(size: int, index: int) -> torch.Tensor:
    return torch.full((size,), float(index))


def limit_file_size(bytes_max: int, worker: int) -> None:
    """From here on a memfd cannot grow beyond the limit, as under a full memory cgroup."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, bytes_max))


@pytest.mark.parametrize("cap", [1, 4096, 100_000, 1 << 20])
@pytest.mark.parametrize("size", [1, 1000, 200_000])
def test_all_batches_arrive_under_a_small_arena_cap(
    cap: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ARENA_BYTES", str(cap))
    loader = DataLoader(Computed(24, partial(row, size)), batch_size=2, num_workers=2)
    kept = list(loader)
    for place, batch in enumerate(kept):
        assert batch.shape == (2, size)
        assert torch.equal(batch[:, 0], torch.tensor([2.0 * place, 2.0 * place + 1]))
        assert torch.equal(batch[:, -1], batch[:, 0])


@pytest.mark.parametrize("bytes_max", [0, 4096, 1 << 20])
@pytest.mark.parametrize("size", [10, 300_000])
def test_all_batches_arrive_if_shared_memory_cannot_grow(bytes_max: int, size: int) -> None:
    """posix_fallocate fails in the worker: the batch is sent another way, and never with SIGBUS."""
    loader = DataLoader(
        Computed(12, partial(row, size)),
        batch_size=2,
        num_workers=2,
        worker_init_fn=partial(limit_file_size, bytes_max),
    )
    kept = list(loader)
    assert [int(batch[0, 0]) for batch in kept] == list(range(0, 12, 2))
    assert all(torch.equal(batch[:, 0], batch[:, -1]) for batch in kept)


def test_gathered_and_custom_batches_arrive_if_memory_cannot_grow() -> None:
    limit = partial(limit_file_size, 0)
    rows = TensorDataset(torch.arange(100_000.0).view(100, 1000), torch.arange(100))
    gathered = DataLoader(rows, batch_size=10, num_workers=1, worker_init_fn=limit)
    assert [int(batch[1][0]) for batch in gathered] == list(range(0, 100, 10))
    own = DataLoader(rows, batch_size=10, num_workers=1, worker_init_fn=limit, collate_fn=dict)
    assert [len(batch) for batch in own] == [10] * 10


def test_memory_exhausted_mid_epoch_loses_no_batch() -> None:
    def sample(index: int) -> torch.Tensor:
        if index == 10:
            limit_file_size(0, 0)
        return row(1 << (2 * (index // 4) + 4), index)

    loader = DataLoader(Computed(24, sample), batch_size=None, num_workers=1)
    assert [int(batch[0]) for batch in loader] == list(range(24))


def test_all_batches_arrive_with_few_descriptors_in_the_worker() -> None:
    """Each kept batch of torch's would need one."""

    def limit(worker: int) -> None:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, used + 4))

    loader = DataLoader(
        Computed(300, partial(row, 3000)), batch_size=2, num_workers=1, worker_init_fn=limit
    )
    kept = list(loader)
    assert [int(batch[0, 0]) for batch in kept] == list(range(0, 300, 2))


def test_forked_workers_hold_no_socket_of_other_workers() -> None:
    """A worker does not see its trainer die while another process holds the trainer's end."""

    def sockets() -> set[str]:
        return {one for one in process_traces.descriptors() if "socket:" in one}

    before = sockets()  # of earlier tests, some of which may be closed meanwhile

    def count(_: int) -> int:
        return len(sockets() - before)

    counts = [int(batch) for batch in DataLoader(Computed(6, count), num_workers=3)]
    assert counts == [1] * 6


def test_descriptor_exhaustion_is_a_clear_error_and_leaves_nothing() -> None:
    list(DataLoader([1], num_workers=1))
    before = process_traces.take()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    loader = DataLoader(Computed(10, number), num_workers=2)
    # One more would leave room for the first of the two pipes that multiprocessing opens for a
    # process, and it forgets that one if there is no room for the second.
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 3, hard))
    try:
        error = error_of(lambda: list(loader))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert isinstance(error, (OSError, SharedMemoryError))
    assert "open files" in str(error), str(error)
    assert process_traces.take().since(before) == {}
    assert len(list(loader)) == 10


def test_unmappable_arena_is_a_clear_error() -> None:
    """Address space is limited after the first batches; the next, larger arena does not fit."""

    def sample(index: int) -> torch.Tensor:
        return row(100 if index < 10 else 100_000_000, index)

    loader = DataLoader(Computed(20, sample), batch_size=None, num_workers=1, prefetch_factor=1)
    iterator = iter(loader)
    next(iterator)
    pages = int(open("/proc/self/statm").read().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (256 << 20), hard))
    try:
        error: Any = None
        while error is None:
            try:
                next(iterator)
            except StopIteration:
                break
            except Exception as caught:
                error = without_frames(caught)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert isinstance(error, SharedMemoryError)
    assert "Cannot allocate memory" in str(error)


def die(index: int) -> Any:
    if index == 6:
        time.sleep(1)  # its messages have left it by then
        os._exit(7)
    return number(index)


def test_dead_worker_is_noticed_while_waiting_for_another() -> None:
    """Worker 1 dies while the test holds worker 0, whose batch is due."""
    reader, writer = os.pipe()

    def sample(index: int) -> Any:
        if index == 0:
            os.read(reader, 1)
        if index == 1:
            os._exit(7)
        return number(index)

    iterator = iter(DataLoader(Computed(4, sample), num_workers=2, prefetch_factor=1, timeout=30))
    error = next_error(iterator)
    os.write(writer, b"!")
    assert type(error) is RuntimeError
    assert "exited unexpectedly" in str(error)
    del iterator
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    ("kill", "text"),
    [
        (signal.SIGKILL, "is killed by signal: Killed"),
        (signal.SIGSEGV, "is killed by signal: Segmentation fault"),
        (signal.SIGTERM, "exited unexpectedly"),  # its parent's SIGTERM is an order to leave
    ],
)
def test_worker_killed_between_batches_raises_torch_error(kill: signal.Signals, text: str) -> None:
    iterator = iter(DataLoader(Computed(100, number), num_workers=1, prefetch_factor=1))
    next(iterator)
    worker = iterator._workers[0]  # type: ignore[attr-defined]

    def kill_and_go_on() -> None:
        os.kill(worker.pid, kill)
        process_traces.wait_gone([worker.pid], 5)  # torch's signal handler may raise in here
        next(iterator)
        next(iterator)

    error = error_of(kill_and_go_on)
    assert type(error) is RuntimeError
    assert str(error).startswith("DataLoader worker (pid")
    assert str(worker.pid) in str(error)
    assert text in str(error)


def test_batches_sent_before_a_worker_died_are_delivered() -> None:
    iterator = iter(DataLoader(Computed(20, die), num_workers=1, prefetch_factor=4))
    got = []
    try:
        for batch in iterator:
            got.append(describe(batch))
    except RuntimeError as error:
        without_frames(error)
    assert got == [describe(number(index)[None]) for index in range(6)]


def test_worker_exit_with_code_zero_is_noticed_at_once() -> None:
    """Torch notices at its next check, up to 5 s later."""
    dataset = Computed(4, lambda index: os._exit(0))
    error = next_error(iter(DataLoader(dataset, num_workers=1, timeout=3)))
    assert type(error) is RuntimeError
    assert "exited unexpectedly" in str(error)


def test_timeout_applies_to_each_batch_and_not_to_the_epoch() -> None:
    loader = DataLoader(Computed(400, number), num_workers=1, timeout=20, prefetch_factor=1)
    assert len(list(loader)) == 400


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"sampler": list(range(20))}, {"sampler": [str(index) for index in range(20)]}]
)
def test_timeout_names_the_worker_samples_and_hanging_line(
    options: dict[str, Any],
) -> None:
    reader, writer = os.pipe()

    def hang_at_five(index: int | str) -> int:
        if int(index) == 5:
            os.read(reader, 1)  # the line to be named
        return int(index)

    loader = DataLoader(
        Computed(20, hang_at_five), batch_size=2, num_workers=2, timeout=1, **options
    )
    iterator = iter(loader)
    assert [int(next(iterator)[0]) for _ in range(2)] == [0, 2]
    error = str(next_error(iterator))
    pid = iterator._workers[0].pid  # type: ignore[attr-defined]
    first, second, *stack = error.splitlines()
    assert first == "DataLoader timed out after 1 seconds"
    samples = "['4', '5']" if "4" in options.get("sampler", []) else "[4, 5]"
    assert second == (
        f"Worker 0 (pid {pid}) has not delivered batch 2, samples {samples}; "
        f"its stack, most recent call first:"
    )
    line = hang_at_five.__code__.co_firstlineno + 2
    assert any(f'test_faults.py", line {line} in hang_at_five' in frame for frame in stack)
    os.write(writer, b"!")
    assert [int(next(iterator)[0]) for _ in range(8)] == list(range(4, 20, 2)), "it goes on"
    del iterator
    os.close(reader)
    os.close(writer)


@pytest.fixture
def small_memory_group() -> Iterator[Path]:
    """A control group whose processes may take 32 MiB more, of the first or second version."""
    name = f"penstock-test-{os.getpid()}"
    root, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    swap = {"memory.memsw.limit_in_bytes": 32 << 20}
    if not root.is_dir():
        root, limit, swap = Path("/sys/fs/cgroup"), "memory.max", {"memory.swap.max": 0}
    group = root / name
    try:
        group.mkdir()
        (group / limit).write_text(str(32 << 20))
        for file, count in swap.items():  # where there is no swap there may be no such file
            if (group / file).exists():
                (group / file).write_text(str(count))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group with a limit of memory can be made here: {error}")
    yield group
    deadline = time.monotonic() + 10
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    group.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize("trainer_is", ["waiting", "computing"])
def test_out_of_memory_kill_is_reported_as_such(small_memory_group: Path, trainer_is: str) -> None:
    def devour(index: int) -> Any:
        if index == 1:
            (small_memory_group / "cgroup.procs").write_text(str(os.getpid()))
            return bytearray(os.urandom(1 << 20) * 200)
        return number(index)

    iterator = iter(DataLoader(Computed(4, devour), num_workers=1, prefetch_factor=2))
    (worker,) = iterator._workers  # type: ignore[attr-defined]

    def compute() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            pass

    error = error_of(lambda: list(iterator)) if trainer_is == "waiting" else error_of(compute)
    assert type(error) is RuntimeError
    text = str(error)
    assert text.startswith(f"DataLoader worker (pid {worker.pid}) is killed by signal: Killed. ")
    assert "because memory ran out since this loader started its workers" in text
    assert text.count("memory ran out") == 1


def test_ordinary_kill_is_not_reported_as_out_of_memory() -> None:
    iterator = iter(DataLoader(Computed(50, number), num_workers=1, prefetch_factor=1))
    (worker,) = iterator._workers  # type: ignore[attr-defined]
    os.kill(worker.pid, signal.SIGKILL)
    error = error_of(lambda: list(iterator))
    assert "is killed by signal: Killed" in str(error)
    assert "memory" not in str(error)


def test_stopped_worker_causes_a_timeout_and_is_removed() -> None:
    iterator = iter(DataLoader(Computed(50, number), num_workers=1, timeout=1, prefetch_factor=1))
    next(iterator)
    (worker,) = iterator._workers  # type: ignore[attr-defined]
    os.kill(worker.pid, signal.SIGSTOP)
    error: Any = None
    while error is None:
        try:
            next(iterator)
        except Exception as caught:
            error = without_frames(caught)
    first, second = str(error).splitlines()
    assert first == "DataLoader timed out after 1 seconds"
    assert second.startswith(f"Worker 0 (pid {worker.pid}) has not delivered batch ")
    assert second.endswith("; it is stopped by a signal")
    os.kill(worker.pid, signal.SIGCONT)
    del iterator
    assert process_traces.wait_gone([worker.pid], 5) == []


FIRST_LOADER = (
    BY_FORK
    + """
import os, signal
from penstock import DataLoader
from penstock.loader import process_limits

batches = iter(DataLoader(range(10), num_workers=1, prefetch_factor=1))
next(batches)
process_limits._kills_before -= 1  # as if the kernel had ended a process since
os.kill(batches._workers[0].pid, signal.SIGKILL)
try:
    signal.sigtimedwait([], 30)
except RuntimeError as error:
    print("memory ran out" in str(error))
"""
)


@pytest.mark.slow
def test_first_loader_explains_a_kill_reported_by_a_signal() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LOADER], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "True\n", done.stderr
