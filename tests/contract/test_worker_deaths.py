# SPDX-License-Identifier: Apache-2.0
"""Workers that exit, are killed, crash or hang: torch's RuntimeError, soon, without leftovers."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import process_traces
import pytest
import torch
from sample_datasets import Computed, Streamed, number, worker_id
from stream_oracle import next_error, without_frames

pytestmark = pytest.mark.torch_may_leave(
    "torch's error comes out of a signal handler, in the middle of whatever its queues are doing"
)


def leaves_at(bad: int, leave: Callable[[], Any], index: int) -> Any:
    if index == bad:
        leave()
    return number(index)


def kill_self(how: signal.Signals) -> None:
    os.kill(os.getpid(), how)


def abort() -> None:
    faulthandler.disable()  # which would print the stacks of the whole suite
    os.abort()


def crash() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def first_failure(iterator: Iterator[Any]) -> tuple[int, Exception]:
    """The number of batches that arrived, and the event that followed."""
    for count in range(100):
        try:
            next(iterator)
        except Exception as error:
            without_frames(error)
            return count, error
    raise AssertionError("no worker has failed")


def chain_of(error: BaseException | None) -> str:
    """The texts of an error and its causes: the system's message on a death may be the first
    cause."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


WAYS: dict[str, tuple[Callable[[], Any], str]] = {
    "os._exit": (partial(os._exit, 7), "exited unexpectedly"),
    "sys.exit": (partial(sys.exit, 3), "exited unexpectedly"),
    "SIGKILL": (partial(kill_self, signal.SIGKILL), "is killed by signal: Killed"),
    "SIGTERM": (partial(kill_self, signal.SIGTERM), "is killed by signal: Terminated"),
    "SIGABRT": (abort, "is killed by signal: Aborted"),
    "a segmentation fault": (crash, "is killed by signal: Segmentation fault"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", [1, 2])
def test_worker_death_raises_the_runtime_error_of_torch(
    loader_class: type, way: str, workers: int
) -> None:
    leave, text = WAYS[way]
    dataset = Computed(20, partial(leaves_at, 6, leave))
    iterator = iter(loader_class(dataset, batch_size=2, num_workers=workers, prefetch_factor=1))
    pids = [worker.pid for worker in iterator._workers]
    count, error = first_failure(iterator)
    assert type(error) is RuntimeError
    assert re.match(r"DataLoader worker \(pid(\(s\))? (\d+(, )?)+\) ", str(error)), str(error)
    assert text in chain_of(error)
    assert any(str(pid) in str(error) for pid in pids)
    assert count <= 3
    del iterator
    assert process_traces.wait_gone(pids, 10) == []


@pytest.mark.slow
def test_worker_exit_with_code_zero_is_an_error(loader_class: type) -> None:
    dataset = Computed(20, partial(leaves_at, 6, partial(os._exit, 0)))
    iterator = iter(loader_class(dataset, batch_size=2, num_workers=2, prefetch_factor=1))
    _, error = first_failure(iterator)
    assert type(error) is RuntimeError
    assert re.match(r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly", str(error))


def test_exit_codes_are_reported_as_by_torch(loader_class: type) -> None:
    dataset = Computed(4, partial(leaves_at, 0, partial(os._exit, 7)))
    error = next_error(iter(loader_class(dataset, num_workers=1)))
    expected = "exited unexpectedly with exit code 7. Details are lost due to multiprocessing. "
    expected += "Rerunning with num_workers=0 may give better error trace."
    assert expected in chain_of(error)


def test_worker_killed_while_the_trainer_waits_is_an_error(
    loader_class: type,
) -> None:
    """The sample names its process and waits; a child of ours kills it meanwhile."""
    reader, writer = os.pipe()

    def wait(index: int) -> Any:
        os.write(writer, b"%d\n" % os.getpid())
        signal.pause()

    iterator = iter(loader_class(Computed(4, wait), num_workers=1, prefetch_factor=1))
    killer = os.fork()
    if killer == 0:
        os.kill(int(os.read(reader, 20)), signal.SIGKILL)
        os._exit(0)
    error = next_error(iterator)
    os.waitpid(killer, 0)
    os.close(reader)
    os.close(writer)
    assert type(error) is RuntimeError
    assert "is killed by signal: Killed" in chain_of(error)


def test_worker_death_in_worker_init_fn_is_an_error(loader_class: type) -> None:
    loader = loader_class(
        Computed(4, number), num_workers=2, worker_init_fn=lambda worker: os._exit(5)
    )
    _, error = first_failure_of(loader)
    assert type(error) is RuntimeError
    assert "exited unexpectedly" in str(error)


def first_failure_of(loader: Any) -> tuple[int, Exception]:
    try:
        iterator = iter(loader)
    except Exception as error:
        without_frames(error)
        return 0, error
    return first_failure(iterator)


def test_worker_death_in_an_iterable_dataset_is_an_error(loader_class: type) -> None:
    def items() -> Iterator[int]:
        yield 1
        if worker_id() == 1:
            os._exit(4)
        yield 2

    _, error = first_failure_of(loader_class(Streamed(items), num_workers=2))
    assert type(error) is RuntimeError
    assert "exited unexpectedly" in str(error)


def test_new_epoch_works_after_a_worker_death(loader_class: type) -> None:
    marks: list[int] = []

    def once(index: int) -> Any:
        if index == 3 and not marks:
            os._exit(9)
        return number(index)

    loader = loader_class(Computed(8, once), num_workers=2)
    first_failure_of(loader)
    marks.append(1)
    assert [batch[0, 0].item() for batch in loader] == [float(k) for k in range(8)]


def test_worker_death_does_not_disturb_another_loader(loader_class: type) -> None:
    healthy = iter(loader_class(Computed(30, number), num_workers=1, prefetch_factor=1))
    next(healthy)
    dataset = Computed(20, partial(leaves_at, 2, partial(os._exit, 7)))
    first_failure_of(loader_class(dataset, num_workers=1))
    assert len(list(healthy)) == 29


def test_death_of_a_user_child_does_not_disturb_a_loader(loader_class: type) -> None:
    iterator = iter(loader_class(Computed(30, number), num_workers=1, prefetch_factor=1))
    for _ in range(3):
        next(iterator)
        child = os.fork()
        if child == 0:
            os._exit(3)
        os.waitpid(child, 0)
    assert len(list(iterator)) == 27


def test_sigchld_handler_of_the_user_is_still_called(loader_class: type) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda number, frame: seen.append(number))
    try:
        list(loader_class(Computed(4, number), num_workers=1))
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert seen


@pytest.mark.slow
def test_hanging_worker_raises_a_timeout_error(loader_class: type) -> None:
    reader, writer = os.pipe()

    def wait(index: int) -> Any:
        if index == 1:
            os.read(reader, 1)
        return number(index)

    loader = loader_class(Computed(4, wait), num_workers=1, timeout=0.5, prefetch_factor=1)
    iterator = iter(loader)
    next(iterator)
    error = next_error(iterator)
    assert type(error) is RuntimeError
    assert str(error).splitlines()[0] == "DataLoader timed out after 0.5 seconds"
    os.write(writer, b"!")
    del iterator
    os.close(reader)
    os.close(writer)


def test_slow_worker_is_waited_for(loader_class: type) -> None:
    """It is opened by the process that the trainer's next() has let run."""
    reader, writer = os.pipe()

    def wait(index: int) -> Any:
        os.read(reader, 1)
        return number(index)

    iterator = iter(loader_class(Computed(3, wait), num_workers=1, timeout=30))
    for index in range(3):
        os.write(writer, b"!")
        assert next(iterator)[0, 0] == index
    os.close(reader)
    os.close(writer)


def test_worker_segfault_prints_the_message_of_torch(
    loader_class: type, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = Computed(4, partial(leaves_at, 0, crash))
    first_failure_of(loader_class(dataset, num_workers=1))
    assert "Unexpected segmentation fault encountered in worker." in capfd.readouterr().err


def test_oversized_tensor_is_an_error_of_its_batch(loader_class: type) -> None:
    def huge(index: int) -> torch.Tensor:
        return torch.empty(1 << 62) if index == 1 else number(index)

    iterator = iter(loader_class(Computed(3, huge), num_workers=1))
    next(iterator)
    error = next_error(iterator)
    assert "Caught RuntimeError in DataLoader worker process 0" in str(error)
    assert next(iterator)[0, 0] == 2
