# SPDX-License-Identifier: Apache-2.0
"""Which worker makes which batch, how far ahead, and in which order they arrive."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sample_datasets import Computed, Streamed, as_is, number, worker_id
from stream_oracle import next_error
from torch.utils.data import get_worker_info

# On a small machine these run with more workers than cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def maker(index: int) -> tuple[int, int]:
    return (index, worker_id())


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_batches_are_assigned_to_workers_round_robin(
    loader_class: type, workers: int, prefetch: int
) -> None:
    loader = loader_class(
        Computed(17, maker),
        batch_size=2,
        num_workers=workers,
        prefetch_factor=prefetch,
        collate_fn=as_is,
    )
    for number_of_batch, batch in enumerate(loader):
        assert {worker for _, worker in batch} == {number_of_batch % workers}


class Gate:
    """A pipe at which a worker waits. The trainer, or another worker, opens it."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def wait(self) -> None:
        assert os.read(self.reader, 1) == b"!"

    def open(self, times: int = 1) -> None:
        os.write(self.writer, b"!" * times)

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


def test_in_order_delivery_waits_for_a_slow_first_batch(loader_class: type, gate: Gate) -> None:
    """The second worker's batch exists before the first worker's is started."""

    def sample(index: int) -> int:
        if index == 0:
            gate.wait()
        if index == 1:
            gate.open()
        return index

    loader = loader_class(Computed(6, sample), batch_size=None, num_workers=2)
    assert [int(batch) for batch in loader] == [0, 1, 2, 3, 4, 5]


def test_out_of_order_delivery_does_not_wait_for_a_slow_batch(
    loader_class: type, gate: Gate
) -> None:
    """The first worker is held until the trainer has received all of the second one's batches."""

    def sample(index: int) -> int:
        if index == 0:
            gate.wait()
        return index

    loader = loader_class(
        Computed(4, sample), batch_size=None, num_workers=2, prefetch_factor=1, in_order=False
    )
    iterator = iter(loader)
    early = [int(next(iterator)) for _ in range(3)]
    assert early == [1, 2, 3]
    gate.open()
    assert [int(batch) for batch in iterator] == [0]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_out_of_order_epoch_yields_each_sample_once(
    loader_class: type, workers: int, persistent: bool
) -> None:
    loader = loader_class(
        Computed(40, float),
        batch_size=3,
        shuffle=True,
        num_workers=workers,
        in_order=False,
        persistent_workers=persistent,
    )
    for _ in range(3):
        samples = torch.cat(list(loader)).tolist()
        assert sorted(samples) == [float(index) for index in range(40)]


def test_out_of_order_iterable_dataset_is_complete(loader_class: type) -> None:
    def uneven() -> Iterator[tuple[int, int]]:
        for index in range(3 + 5 * worker_id()):
            yield (worker_id(), index)

    loader = loader_class(
        Streamed(uneven), batch_size=2, num_workers=3, in_order=False, collate_fn=as_is
    )
    got = sorted(sample for batch in loader for sample in batch)
    assert got == [(worker, index) for worker in range(3) for index in range(3 + 5 * worker)]


def test_batches_are_prefetched(loader_class: type, gate: Gate) -> None:
    """Each sample opens the gate: with the first batch in hand, four samples have been started."""

    def sample(index: int) -> int:
        gate.open()
        return index

    iterator = iter(
        loader_class(Computed(9, sample), batch_size=None, num_workers=2, prefetch_factor=2)
    )
    for _ in range(4):
        gate.wait()
    assert int(next(iterator)) == 0
    gate.wait()
    list(iterator)


def test_prefetching_is_bounded_by_the_prefetch_factor(loader_class: type) -> None:
    reader, writer = os.pipe()

    def sample(index: int) -> int:
        os.write(writer, b"!")
        return index

    loader = loader_class(Computed(50, sample), batch_size=None, num_workers=1, prefetch_factor=3)
    iterator = iter(loader)
    begun = 0
    for taken in range(1, 9):
        next(iterator)
        begun += readable_bytes(reader)
        assert taken <= begun <= taken + 3
    del iterator
    os.close(reader)
    os.close(writer)


def readable_bytes(reader: int) -> int:
    os.set_blocking(reader, False)
    try:
        return len(os.read(reader, 100))
    except BlockingIOError:
        return 0


def test_worker_info_matches_torch_and_is_absent_in_the_trainer(
    loader_class: type,
) -> None:
    def look(index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        try:
            info.id = 7
        except (RuntimeError, AttributeError) as error:  # which of them depends on torch
            refusal = f"{type(error).__name__}: {error}"
        return (info.id, info.num_workers, info.dataset is dataset_in_worker(), refusal, repr(info))

    def dataset_in_worker() -> Any:
        info = torch.utils.data._utils.worker._worker_info
        return None if info is None else info.dataset

    assert get_worker_info() is None
    with pytest.raises((RuntimeError, AttributeError)) as torchs:
        torch.utils.data._utils.worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None).id = 7
    dataset = Computed(2, look)
    for worker, batch in enumerate(loader_class(dataset, batch_size=None, num_workers=2)):
        number_of_worker, count, same, refusal, text = batch
        assert (number_of_worker, count, same) == (worker, 2, True)
        assert refusal == f"{torchs.type.__name__}: {torchs.value}"
        assert text.startswith(f"WorkerInfo(id={worker}, num_workers=2, seed=")
    assert get_worker_info() is None


def test_worker_is_a_daemon_with_one_torch_thread_and_torch_name(loader_class: type) -> None:
    import multiprocessing

    def look(index: int) -> Any:
        with open("/proc/self/comm") as name:
            process = multiprocessing.current_process()
            return (torch.get_num_threads(), process.daemon, name.read().strip(), os.getppid())

    (seen,) = list(loader_class(Computed(1, look), batch_size=None, num_workers=1))
    assert tuple(seen) == (1, True, "pt_data_worker", os.getpid())


def test_workers_exit_with_code_zero_when_the_iterator_is_deleted(loader_class: type) -> None:
    iterator = iter(loader_class(Computed(100, number), num_workers=2))
    next(iterator)
    workers = list(iterator._workers)
    assert all(worker.is_alive() for worker in workers)
    del iterator
    for worker in workers:
        worker.join(10)
        assert worker.exitcode == 0


def test_only_persistent_workers_outlive_the_epoch(loader_class: type) -> None:
    for persistent in (False, True):
        loader = loader_class(Computed(4, number), num_workers=2, persistent_workers=persistent)
        iterator = iter(loader)
        workers = list(iterator._workers)
        assert len(list(iterator)) == 4
        assert [worker.is_alive() for worker in workers] == [persistent] * 2


def test_loader_without_workers_runs_inside_a_worker(loader_class: type) -> None:
    def inner(index: int) -> Any:
        return torch.stack(list(loader_class(Computed(3, float), batch_size=1))).sum()

    batches = list(loader_class(Computed(2, inner), batch_size=2, num_workers=1))
    assert batches[0].tolist() == [3.0, 3.0]


def test_loader_with_workers_fails_inside_a_worker(loader_class: type) -> None:
    def inner(index: int) -> Any:
        return list(loader_class(Computed(3, float), num_workers=1))

    error = next_error(iter(loader_class(Computed(2, inner), num_workers=1)))
    assert type(error) is AssertionError
    assert "daemonic processes are not allowed to have children" in str(error)


def test_affinity_set_by_worker_init_fn_applies_to_the_dataset(loader_class: type) -> None:
    allowed = sorted(os.sched_getaffinity(0))

    def pin(worker: int) -> None:
        os.sched_setaffinity(0, {allowed[-1]})

    def look(index: int) -> int:
        (only,) = os.sched_getaffinity(0)
        return only

    loader = loader_class(Computed(2, look), num_workers=2, worker_init_fn=pin)
    assert [int(batch) for batch in loader] == [allowed[-1]] * 2


def test_loader_works_outside_the_main_thread(loader_class: type) -> None:
    results: list[Any] = []

    def work() -> None:
        loader = loader_class(Computed(20, float), batch_size=2, num_workers=2)
        results.extend(float(batch.sum()) for _ in range(2) for batch in loader)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [float(4 * k + 1) for k in range(10)] * 2
