# SPDX-License-Identifier: Apache-2.0
"""Worker processes of a local pool: their resources, how they start, and loaders in odd places."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from typing import Any

import process_traces
import pytest
import torch
from sample_datasets import Computed, as_is, number
from stream_oracle import describe, error_of
from torch.utils.data import TensorDataset

from penstock import DataLoader
from penstock.loader.delivery import PinDevice


def worker_resources(index: int) -> dict[str, Any]:
    return {
        "threads": process_traces.native_threads(),
        "arenas": len(process_traces.arena_mappings()),
        "sockets": sum("socket:" in entry for entry in process_traces.descriptors()),
    }


def test_worker_has_few_threads_and_only_its_own_arenas() -> None:
    held: list[dict[str, Any]] = []
    for _ in range(3):
        loader = DataLoader(
            Computed(4, worker_resources), batch_size=None, num_workers=2, collate_fn=as_is
        )
        held.extend(loader)
    # Its arena is made with its first batch, and a second one if two of its threads want memory at
    # the same time; the trainer's views of other arenas are not there.
    assert {seen["arenas"] for seen in held} <= {0, 1, 2}
    assert max(seen["threads"] for seen in held) <= 4
    assert len({seen["sockets"] for seen in held}) == 1


def test_forked_worker_has_no_threads_of_other_loaders() -> None:
    first = iter(DataLoader(Computed(50, number), num_workers=1))
    next(first)
    loader = DataLoader(
        Computed(1, worker_resources), batch_size=None, num_workers=1, collate_fn=as_is
    )
    (alone,) = list(loader)
    second = iter(DataLoader(Computed(50, number), num_workers=1))
    next(second)
    (beside_two,) = list(loader)
    assert beside_two["threads"] == alone["threads"]
    del first, second


def test_pin_memory_thread_ends_with_its_iterator() -> None:
    iterator = iter(DataLoader(Computed(50, number), num_workers=1))
    assert not hasattr(iterator, "_pin_memory_thread"), "nothing is pinned, as with torch's"
    iterator._pin_memory = True
    thread = iterator._pin_memory_thread  # type: ignore[attr-defined]
    assert thread.is_alive()
    del iterator
    thread.join(10)
    assert not thread.is_alive()


class Unpinnable(list[Any]):
    def pin_memory(self) -> Any:
        raise ValueError("cannot be pinned")


def test_pinning_error_message_matches_torch() -> None:
    iterator = iter(DataLoader(Computed(4, number), num_workers=1, collate_fn=Unpinnable))
    # Without a GPU the loader leaves it off.
    iterator._delivery = iterator._delivery._replace(pin_device=PinDevice("", 0))
    error = error_of(lambda: next(iterator))
    assert isinstance(error, ValueError)
    assert str(error).startswith("Caught ValueError in pin memory thread for device ")
    assert str(error).endswith("ValueError: cannot be pinned\n")


def test_iterator_in_a_cycle_is_collected_without_leaks() -> None:
    """Torch's loader loses its queues before it can shut down, and waits 5 s for each worker."""
    before = process_traces.take()
    holder: dict[str, Any] = {}
    holder["iterator"] = iter(DataLoader(Computed(50, number), num_workers=2))
    holder["self"] = holder
    next(holder["iterator"])
    workers = holder["iterator"]._workers
    del holder
    gc.collect()
    assert [worker.exitcode for worker in workers] == [0, 0]
    del workers
    gc.collect()
    assert process_traces.take().since(before) == {}


@pytest.mark.parametrize("when", ["before the first batch", "in the middle", "at the end"])
def test_forked_child_can_drop_inherited_iterator(when: str) -> None:
    loader = DataLoader(Computed(30, number), batch_size=2, num_workers=2)
    iterator = iter(loader)
    taken = {"before the first batch": 0, "in the middle": 5, "at the end": 15}[when]
    batches = [next(iterator) for _ in range(taken)]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            del iterator, loader
            batches.clear()
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    batches.extend(iterator)
    assert [int(batch[0, 0]) for batch in batches] == list(range(0, 30, 2))


def test_forked_child_can_use_its_own_loader() -> None:
    """Native threads belong to the process that started them; a child starts new ones."""
    parent = iter(DataLoader(Computed(30, number), batch_size=2, num_workers=1))
    next(parent)
    answers = multiprocessing.get_context("fork").SimpleQueue()

    def work() -> None:
        answers.put(len(list(DataLoader(Computed(30, number), batch_size=2, num_workers=2))))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert answers.get() == 15
    assert len(list(parent)) == 14


@pytest.mark.long
def test_inherited_iterator_takes_no_batches_from_parent() -> None:
    """A child may see the batches that had arrived before the fork, and then an error."""
    iterator = iter(DataLoader(Computed(30, number), batch_size=2, num_workers=1, timeout=5))
    next(iterator)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for place, batch in enumerate(iterator):
                if int(batch[0, 0]) != 2 * place + 2 or place > 10:
                    break
        except Exception:
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    rest = [int(batch[0, 0]) for batch in iterator]
    assert rest == list(range(2, 30, 2))
    assert os.waitstatus_to_exitcode(status) == 0


def run_in_thread(function: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    (result,) = results
    return result


def test_loader_works_outside_the_main_thread() -> None:
    def work() -> int:
        loader = DataLoader(TensorDataset(torch.arange(100.0)), batch_size=10, num_workers=2)
        return sum(int(batch[0].sum()) for _ in range(2) for batch in loader)

    assert run_in_thread(work) == 2 * sum(range(100))


def test_loaders_in_different_threads_are_independent() -> None:
    sums: dict[int, int] = {}

    def work(k: int) -> None:
        loader = DataLoader(Computed(200, lambda index: index + k), batch_size=4, num_workers=1)
        sums[k] = sum(int(batch.sum()) for batch in loader)

    threads = [threading.Thread(target=work, args=(1000 * k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {1000 * k: sum(range(200)) + 200_000 * k for k in range(3)}


FORKING = """
import os, threading, time
import torch
from penstock import DataLoader

inside, most = [], []

def before():
    inside.append(1)
    most.append(len(inside))
    time.sleep(0.1)

os.register_at_fork(before=before, after_in_parent=inside.pop)

def work():
    list(DataLoader(torch.arange(8), num_workers=2, multiprocessing_context="fork"))

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(most), max(most))
"""


@pytest.mark.slow
def test_threads_fork_their_workers_one_after_the_other() -> None:
    """A package's pre-fork hook may not tolerate a fork by another thread."""
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "6 1\n"), done.stderr


def test_batch_memory_is_released_from_another_thread() -> None:
    """As it does behind a queue of the user; its memory is released all the same."""
    loader = DataLoader(TensorDataset(torch.arange(4000.0)), batch_size=10, num_workers=1)
    expected = 0.0
    for batch in loader:
        total = run_in_thread(lambda batch=batch: float(batch[0].sum()))
        assert total == 10 * expected + 45
        expected += 10
        del batch
    assert loader.stats().copied_batches == 0


def test_waiting_for_a_batch_lets_other_threads_run() -> None:
    reader, writer = os.pipe()

    def wait(index: int) -> torch.Tensor:
        os.read(reader, 1)
        return number(index)

    iterator = iter(DataLoader(Computed(1, wait), num_workers=1))
    opener = threading.Thread(target=lambda: os.write(writer, b"!"))
    opener.start()  # could not run while next() kept the interpreter's lock
    assert describe(next(iterator)[0]) == describe(number(0))
    opener.join()
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_failed_start_leaves_no_worker_or_descriptor(method: str) -> None:
    before = process_traces.take()

    class Unpicklable:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return index

        def __reduce__(self) -> Any:
            raise TypeError("stays at home")

    class Failing(multiprocessing.context.ForkContext):
        """Starts one worker and fails at the second."""

        count = 0

        def Process(self, *args: Any, **kwargs: Any) -> Any:
            type(self).count += 1
            if type(self).count > 1:
                raise OSError("no more processes")
            return super().Process(*args, **kwargs)

    context: Any = Failing() if method == "fork" else method
    loader = DataLoader(Unpicklable(), num_workers=2, multiprocessing_context=context)  # type: ignore[arg-type, var-annotated]
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        error = error_of(lambda: iter(loader))
    assert type(error) is (OSError if method == "fork" else TypeError)
    gc.collect()
    assert process_traces.take().since(before) == {}


@pytest.mark.parametrize("count", [1, 3, 17])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_any_number_of_workers_gives_the_same_batches(count: int) -> None:
    loader = DataLoader(Computed(40, number), batch_size=2, num_workers=count)
    assert [int(batch[0, 0]) for batch in loader] == list(range(0, 40, 2))


def test_large_index_reaches_the_worker() -> None:
    """A sampler's item of a megabyte is sent in the other direction."""
    loader = DataLoader(
        Computed(1, len), sampler=["x" * 1_000_000] * 3, batch_size=None, num_workers=1
    )
    assert [int(batch) for batch in loader] == [1_000_000] * 3


def test_thousands_of_tiny_batches_arrive_in_order() -> None:
    loader = DataLoader(TensorDataset(torch.arange(20_000)), batch_size=4, num_workers=2)
    assert torch.equal(torch.cat([batch[0] for batch in loader]), torch.arange(20_000))
