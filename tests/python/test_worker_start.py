# SPDX-License-Identifier: Apache-2.0
"""Workers in fresh interpreters: all are given one pickle, which means the same as a separate one
for each of them."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.reduction
import os
import pickle
import signal
import subprocess
import sys
import warnings
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import process_traces
import pytest
import script_runs
import torch
from sample_datasets import Computed, as_is, number
from stream_oracle import Scenario, describe, record, without_frames
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from penstock import DataLoader
from penstock.worker.worker_start import PickledOnce, StartPermits

BIG = 40_000  # elements: more than the pickle itself holds
METHODS = ["spawn", "forkserver"]

pytestmark = pytest.mark.slow

# multiprocessing keeps the memory that its first Value made for all of them.
FIRST_VALUE = multiprocessing.Value("i", 0)


class Everything(Dataset[Any]):
    """Holds one object of each kind, and reports the state of each where it is read."""

    def __init__(self, method: str) -> None:
        context = multiprocessing.get_context(method)
        plain = np.arange(BIG, dtype=np.float64)
        read_only = plain.copy()
        read_only.flags.writeable = False
        self.arrays = {
            "plain": plain,
            "the same again": plain,
            "one that shares its memory": plain[: BIG // 2],
            "small": np.arange(5),
            "by columns": np.asfortranarray(plain.reshape(200, -1)),
            "strided": plain[::2],
            "read-only": read_only,
            "other byte order": plain.astype(">f8"),
            "records": np.zeros(BIG, [("a", np.int32), ("b", "S5")]),
            "dates": plain.astype("datetime64[s]"),
            "objects": np.array([{"a": 1}] * BIG, dtype=object),
            "matrix": np.ones((200, 200)).view(np.matrix),
        }
        tensor = torch.arange(float(BIG))
        self.tensors = {
            "plain": tensor,
            "view": tensor[100:200].view(10, 10),
            "parameter": torch.nn.Parameter(torch.ones(3)),
            "empty": torch.empty(0, 3),
        }
        self.value = context.Value("i", 7)
        self.lock = context.Lock()
        self.queue = context.SimpleQueue()
        self.itself = self
        self.weights = 0

    def __len__(self) -> int:
        return 4  # two for each worker, so that the second shows what collate did to the first

    def __getitem__(self, index: int) -> Any:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        tensors = self.tensors
        with self.lock:
            return describe(
                (
                    self.arrays,
                    {name: tensor.detach() for name, tensor in tensors.items()},
                    tensors["parameter"].requires_grad,
                    tensors["view"].data_ptr() - tensors["plain"].data_ptr(),
                    tensors["plain"].is_shared(),
                    self.value.value,
                    self.itself is self,
                    info.dataset is self,
                    self.weights,
                    multiprocessing.get_start_method(),
                )
            )

    def collate(self, samples: list[Any]) -> Any:
        self.weights += 1
        return samples

    def set_up(self, worker_id: int) -> None:
        self.weights = 100 * (worker_id + 1)


def with_bound_methods(dataset: Everything, method: str) -> dict[str, Any]:
    return {
        "num_workers": 2,
        "collate_fn": dataset.collate,
        "worker_init_fn": dataset.set_up,
        "multiprocessing_context": method,
    }


@pytest.mark.long("forkserver", "spawn")
@pytest.mark.parametrize("method", METHODS)
def test_dataset_contents_arrive_as_with_torch(method: str) -> None:
    scenario = Scenario(
        "everything", partial(Everything, method), partial(with_bound_methods, method=method)
    )
    got = record(DataLoader, scenario)
    assert got == record(TorchDataLoader, scenario)
    assert not [note for note in got if "error" in note[0]]


@pytest.mark.long("*-forkserver", "threads-*")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"fetch_threads": 2}], ids=["plain", "threads"])
def test_worker_settings_match_torch_workers(method: str, options: dict[str, Any]) -> None:
    """The program's environment and folder, and the settings at the top of its main module."""
    program = Path(__file__).with_name("spawned_program.py")

    def batches(module: str, **options: Any) -> Any:
        command = [sys.executable, str(program), module, method, json.dumps(options)]
        printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=240).stdout
        return json.loads(printed)

    expected, got = batches("torch.utils.data"), batches("penstock", **options)
    if options:  # whose threads draw from one generator, each in its turn
        for batch in [*sum(expected, []), *sum(got, [])]:
            del batch["random"]
    assert got == expected


class CountsPickles(Computed):
    """Its state is the number of times it has been pickled."""

    pickle_count = 0

    def __getstate__(self) -> dict[str, Any]:
        self.pickle_count += 1
        return self.__dict__

    def __getitem__(self, index: int) -> int:
        return self.pickle_count


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_dataset_is_pickled_once_for_all_workers(method: str) -> None:
    dataset = CountsPickles(3, number)
    loader = DataLoader(dataset, batch_size=None, num_workers=3, multiprocessing_context=method)
    assert [list(loader), list(loader)] == [[1, 1, 1], [2, 2, 2]]
    assert dataset.pickle_count == 2


class WaitsToBeRead:
    """Cannot be unpickled before the trainer allows it, and is larger than a pipe's buffer."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.much = bytes(300_000)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        assert os.read(self.connection.fileno(), 1) == b"."  # one for each, in any order

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_iter_does_not_wait_for_dataset_unpickling(method: str) -> None:
    theirs, ours = multiprocessing.Pipe()
    with theirs, ours:
        iterator = iter(
            DataLoader(WaitsToBeRead(theirs), num_workers=2, multiprocessing_context=method)
        )
        os.write(ours.fileno(), b"..")
        assert [int(batch) for batch in iterator] == [0, 1]


class Written(Dataset[Any]):
    """Writes to its arrays; the trainer does so too, after the workers have started."""

    def __init__(self) -> None:
        self.array = np.zeros(BIG)
        self.tensor = torch.zeros(BIG)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[float, float]:
        self.array[0] += 1
        return (float(self.array[0] + self.array[1]), float(self.tensor[0]))


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loader_class", [TorchDataLoader, DataLoader])
def test_tensors_are_shared_and_arrays_are_per_worker(loader_class: Any, method: str) -> None:
    dataset = Written()
    loader = loader_class(
        dataset,
        batch_size=None,
        num_workers=2,
        prefetch_factor=1,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    assert list(loader) == [[1.0, 0.0], [1.0, 0.0], [2.0, 0.0], [2.0, 0.0]]
    dataset.tensor[0] = 5
    dataset.array[1] = 1000
    assert list(loader) == [[3.0, 5.0], [3.0, 5.0], [4.0, 5.0], [4.0, 5.0]]
    assert dataset.array[0] == 0


class FailsToUnpickle(Computed):
    def __setstate__(self, state: Any) -> None:
        raise LookupError("there is no such file here")


@pytest.mark.long
@pytest.mark.parametrize("loader_class", [TorchDataLoader, DataLoader])
def test_worker_reports_unpicklable_dataset(
    loader_class: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """One worker: two would write their tracebacks into each other's lines."""
    loader = loader_class(
        FailsToUnpickle(3, number), num_workers=1, multiprocessing_context="spawn", timeout=60
    )
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*exited unexpectedly") as seen:
        next(iter(loader))
    without_frames(seen.value)
    assert "LookupError: there is no such file here" in capfd.readouterr().err


def test_failed_pickling_leaves_no_descriptors() -> None:
    """The large array is written before the lambda is reached."""
    dataset = Computed(3, partial(lambda array, index: array[index], np.zeros(BIG)))
    loader = DataLoader(dataset, num_workers=2, multiprocessing_context="spawn")
    before = process_traces.descriptors()
    with pytest.warns(UserWarning, match="^Got pickle error when attempting to start a worker"):
        try:
            iter(loader)
        except (AttributeError, pickle.PicklingError) as error:
            without_frames(error)
    assert process_traces.descriptors() == before


@pytest.mark.long
def test_replaced_reduction_dump_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pickled = []

    def dump(value: Any, file: Any, protocol: int | None = None) -> None:
        pickled.append(type(value).__name__)
        multiprocessing.reduction.ForkingPickler(file, protocol).dump(value)

    monkeypatch.setattr(multiprocessing.reduction, "dump", dump)
    dataset = CountsPickles(2, number)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert list(loader) == [1, 2]
    assert pickled.count("SpawnProcess") == 2


class PassesDescriptorTwice(Computed):
    """Gives one descriptor to the worker under two names, each to be closed."""

    def __getstate__(self) -> dict[str, Any]:
        return {"ends": [multiprocessing.reduction.DupFd(0) for _ in range(2)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.length = 2
        self.ends = [end.detach() for end in state["ends"]]

    def __getitem__(self, index: int) -> int:
        os.close(self.ends.pop())
        return len(self.ends)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", METHODS)
def test_descriptor_may_be_passed_twice(method: str) -> None:
    """Python refuses the second ("bad value(s) in fds_to_keep") when it starts a process."""
    dataset = PassesDescriptorTwice(2, number)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=method)
    assert list(loader) == [1, 0]


class InterruptsPickling(Computed):
    def __getstate__(self) -> dict[str, Any]:
        raise KeyboardInterrupt


def test_interrupt_during_pickling_leaves_nothing() -> None:
    loader = DataLoader(
        InterruptsPickling(3, number), num_workers=4, multiprocessing_context="spawn"
    )
    try:
        iter(loader)
        raise AssertionError("it was not interrupted")
    except KeyboardInterrupt as interrupt:
        without_frames(interrupt)  # type: ignore[arg-type]


def test_forked_worker_gets_the_same_object() -> None:
    secret = object()
    loader = DataLoader(
        Computed(2, lambda index: id(secret)),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
    )
    assert list(loader) == [id(secret)] * 2


class ReportsUnpickling:
    """Reports when it is unpickled, and blocks until the test lets it end."""

    def __init__(self, name: str, connection: Connection, waits: bool, dies: bool = False) -> None:
        self.parts = (name, connection, waits, dies)

    def __reduce__(self) -> Any:
        return _tell, self.parts


def _tell(name: str, connection: Connection, waits: bool, dies: bool) -> None:
    connection.send(name)
    if waits:
        connection.recv()
        connection.send(f"end of {name}")
    if dies:
        os._exit(0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dies", [False, True], ids=["done", "dead"])
@pytest.mark.parametrize("method", METHODS)
def test_worker_waits_until_previous_one_imported_or_died(method: str, dies: bool) -> None:
    context = multiprocessing.get_context(method)
    theirs, ours = multiprocessing.Pipe()
    permits = StartPermits(2, 1)
    processes = []
    with theirs, ours:
        for name in ("first", "second"):
            permit = permits.next_permit()
            tells = ReportsUnpickling(name, theirs, name == "first", dies)
            process = context.Process(target=as_is, args=((tells, permit),), name=name)
            permit.delay_start(process)
            assert process.name == name
            process.start()
            processes.append(process)
        permits.close()
        heard = [ours.recv()]
        ours.send("go on")
        heard += [ours.recv(), ours.recv()]
        for process in processes:
            process.join()
    assert heard == ["first", "end of first", "second"]


@pytest.mark.long("forkserver")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", METHODS)
def test_waiting_workers_exit_when_the_trainer_is_killed(method: str, tmp_path: Path) -> None:
    program = f"""
        import os
        from torch.utils.data import DataLoader

        if __name__ == "__main__":
            os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
            loader = DataLoader(range(9), num_workers=3, multiprocessing_context={method!r})
            iterator = iter(loader)
            print(*(worker.pid for worker in iterator._workers), flush=True)
    """
    with script_runs.running("penstock", program, tmp_path) as run:
        pids = run.read_pids()
        run.signal(signal.SIGKILL)
        run.process.wait()
        assert len(pids) == 3
        assert process_traces.wait_gone(pids, 40.0) == []


@pytest.mark.long
@pytest.mark.parametrize("loader_name", ["torch", "penstock"])
def test_file_system_sharing_works_with_several_workers(loader_name: str, tmp_path: Path) -> None:
    program = """
        import torch
        from torch.utils.data import DataLoader

        class Rows:
            def __init__(self):
                self.rows = torch.arange(30000.0)
                self.table = self.rows.view(100, 300)
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return self.rows[index] + self.table[index, 0]

        if __name__ == "__main__":
            torch.multiprocessing.set_sharing_strategy("file_system")
            rows = Rows()
            for _ in range(2):
                loader = DataLoader(rows, num_workers=2, multiprocessing_context="spawn")
                print([int(batch) for batch in loader], flush=True)
    """
    with script_runs.running(loader_name, program, tmp_path) as run:
        code, out, error = run.finish()
    assert (code, out) == (0, "[0, 301, 602, 903]\n" * 2), error


@pytest.mark.long
def test_workers_get_separate_pickles_without_shared_memory(tmp_path: Path) -> None:
    program = """
        import resource
        from torch.utils.data import DataLoader

        class Much(list):
            pickle_count = 0
            def __reduce__(self):
                Much.pickle_count += 1
                return Much, (list(self),)

        if __name__ == "__main__":
            much = Much(range(100_000))
            options = {"num_workers": 2, "multiprocessing_context": "spawn"}
            loader = DataLoader(much, batch_size=None, **options)
            resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
            iterator = iter(loader)
            print([next(iterator) for _ in range(4)], Much.pickle_count > 2)
    """
    with script_runs.running("penstock", program, tmp_path) as run:
        code, out, error = run.finish()
    assert (code, out) == (0, "[0, 1, 2, 3] True\n"), error


def test_pickled_once_outside_a_start_pickles_its_value() -> None:
    assert pickle.loads(pickle.dumps(PickledOnce([1]))).value == [1]


@pytest.mark.long
def test_process_class_of_user_context_is_used() -> None:
    class Context(multiprocessing.context.SpawnContext):
        class Process(multiprocessing.context.SpawnProcess):  # type: ignore[misc, name-defined]
            pass

    Context.Process.__qualname__ = "OwnProcess"
    sys.modules[__name__].OwnProcess = Context.Process  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loader = DataLoader(range(3), num_workers=1, multiprocessing_context=Context())
            iterator = iter(loader)
            assert type(iterator._workers[0]) is Context.Process  # type: ignore[attr-defined]
    finally:
        del iterator
        del sys.modules[__name__].OwnProcess  # type: ignore[attr-defined]
