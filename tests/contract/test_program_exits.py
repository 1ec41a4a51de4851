# SPDX-License-Identifier: Apache-2.0
"""How a whole program ends: normally, in the middle, by Ctrl-C, by an error, or killed."""

from __future__ import annotations

import signal
from pathlib import Path

import process_traces
import pytest
from script_runs import ORPHAN_SECONDS_MAX, ScriptRun, running

pytestmark = pytest.mark.slow

# A dataset whose later samples wait until the trainer opens a gate; and printing of worker pids.
HEAD = """
import os, sys
import torch
from torch.utils.data import Dataset
from torch.utils.data import DataLoader

reader, writer = os.pipe()

class Gated(Dataset):
    def __init__(self, free):
        self.free = free
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if index >= self.free:
            os.read(reader, 1)
        return torch.full((1000,), float(index))

def say_pids(iterator):
    print(*(worker.pid for worker in iterator._workers), flush=True)
"""


# Known leftovers of torch's loader: multiprocessing folders of killed or hurried workers.
LEFT_BY = {"torch": "pymp-", "penstock": "nothing"}


def assert_all_is_gone(run: ScriptRun, pids: list[int], loader_name: str) -> None:
    assert process_traces.wait_gone(pids, ORPHAN_SECONDS_MAX) == []
    left = run.left_files()
    assert [name for name in left if not name.startswith(LEFT_BY[loader_name])] == []


@pytest.mark.long
def test_program_ending_within_epochs_is_silent(loader_name: str, tmp_path: Path) -> None:
    """Iterators of all kinds are still alive, as globals, when the interpreter ends."""
    source = f"""{HEAD}
plain = iter(DataLoader(Gated(1000), batch_size=2, num_workers=2))
persistent_loader = DataLoader(Gated(1000), num_workers=1, persistent_workers=True)
persistent = iter(persistent_loader)
pinned = iter(DataLoader(Gated(1000), num_workers=1, pin_memory=True, prefetch_factor=4))
for iterator in (plain, persistent, pinned):
    batch = next(iterator)
    say_pids(iterator)
kept = [batch for batch in DataLoader(Gated(1000), batch_size=10, num_workers=2)]
keep_in_module = torch.kept = kept
print(sum(float(batch.sum()) for batch in kept))
"""
    with running(loader_name, source, tmp_path) as run:
        pids = [*run.read_pids(), *run.read_pids(), *run.read_pids()]
        assert run.finish() == (0, "499500000.0\n", "")
        assert_all_is_gone(run, pids, loader_name)


@pytest.mark.long
def test_training_error_ends_the_program_with_one_traceback(
    loader_name: str, tmp_path: Path
) -> None:
    source = f"""{HEAD}
def train():
    iterator = iter(DataLoader(Gated(1000), batch_size=2, num_workers=2))
    say_pids(iterator)
    for batch in iterator:
        raise ValueError("loss is nan")
train()
"""
    with running(loader_name, source, tmp_path) as run:
        pids = run.read_pids()
        code, out, error = run.finish()
        assert (code, out) == (1, "")
        assert error.count("Traceback") == 1
        assert error.endswith("ValueError: loss is nan\n")
        assert_all_is_gone(run, pids, loader_name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("to", ["the trainer", "the whole group"])
def test_ctrl_c_while_waiting_for_a_batch_raises_keyboard_interrupt(
    loader_name: str, to: str, tmp_path: Path
) -> None:
    """The next batch never arrives. The interrupt reaches the loop, and a new loader works."""
    source = f"""{HEAD}
iterator = iter(DataLoader(Gated(4), batch_size=2, num_workers=2, prefetch_factor=1))
try:
    next(iterator), next(iterator)
    say_pids(iterator)
    next(iterator)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    os.write(writer, b"!" * 100)
del iterator
print(len(list(DataLoader(Gated(1000), batch_size=100, num_workers=2))), flush=True)
"""
    with running(loader_name, source, tmp_path) as run:
        pids = run.read_pids()
        if to == "the trainer":
            run.signal(signal.SIGINT)
        else:
            run.signal_group(signal.SIGINT)
        assert run.read_line() == "interrupted"
        assert run.finish() == (0, "10\n", "")
        assert_all_is_gone(run, pids, loader_name)


@pytest.mark.long
def test_uncaught_ctrl_c_ends_the_program_at_once(loader_name: str, tmp_path: Path) -> None:
    source = f"""{HEAD}
from torch.utils.data import RandomSampler

endless = RandomSampler(Gated(1000), replacement=True, num_samples=1 << 40)
iterator = iter(DataLoader(Gated(1000), batch_size=2, num_workers=2, sampler=endless))
next(iterator), next(iterator)  # both workers are past their start, where an interrupt is an error
say_pids(iterator)
for batch in iterator:
    pass
"""
    with running(loader_name, source, tmp_path) as run:
        pids = run.read_pids()
        run.signal_group(signal.SIGINT)
        code, out, error = run.finish()
        assert (code, out) == (-signal.SIGINT, "")
        assert error.endswith("KeyboardInterrupt\n")
        assert error.count("Traceback") == 1
        assert_all_is_gone(run, pids, loader_name)


@pytest.mark.long
def test_repeated_notebook_interrupts_accumulate_nothing(loader_name: str, tmp_path: Path) -> None:
    """A cell is interrupted while it waits for a batch, or anywhere else, and run again.

    Torch's loader only has to continue: an interrupt that hits its threads leaves their
    descriptors, on a busy machine in most runs, and one that hits its iterator while that is made
    leaves a worker, now and then. It ends its workers, too, and where Python drops the trainer's,
    as in a `__del__`, the cell ends by their death.
    """
    ending = {"torch": "(KeyboardInterrupt, RuntimeError)", "penstock": "KeyboardInterrupt"}
    source = f"""{HEAD}
import gc, random, signal, threading, time

def held():
    gc.collect()
    return (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")),
            len(open("/proc/self/task/%d/children" % os.getpid()).read().split()))

def cell():
    loader = DataLoader(Gated(100), batch_size=2, num_workers=2, persistent_workers=True)
    for batch in loader:
        pass

after = []
for turn in range(50):
    timer = threading.Timer(0.05 + 0.1 * random.random(), os.killpg, [0, signal.SIGINT])
    try:
        timer.start()
        cell()
    except {ending[loader_name]}:
        pass
    timer.join()
    os.write(writer, b"!" * 8)
    if turn in (9, 49):
        deadline = time.monotonic() + 20
        while held()[2] > 0 and time.monotonic() < deadline:
            time.sleep(0.1)  # nothing tells when workers of a loader that is gone have ended
        after.append(held())
print(after[1][0] <= after[0][0] + 1, after[1][1] <= after[0][1] + 1, after[1][2], flush=True)
"""
    with running(loader_name, source, tmp_path) as run:
        code, out, error = run.finish()
        assert code == 0, error
        if loader_name == "penstock":
            assert out == "True True 0\n", error


@pytest.mark.long
def test_workers_of_a_killed_trainer_exit_and_leave_nothing(
    loader_name: str, tmp_path: Path
) -> None:
    source = f"""{HEAD}
iterator = iter(DataLoader(Gated(1000), batch_size=2, num_workers=2))
kept = [next(iterator) for _ in range(3)]
say_pids(iterator)
os.read(reader, 1)
"""
    with running(loader_name, source, tmp_path) as run:
        pids = run.read_pids()
        run.signal(signal.SIGKILL)
        run.process.wait()
        assert_all_is_gone(run, pids, loader_name)


def test_killed_program_leaves_no_shared_memory(loader_name: str, tmp_path: Path) -> None:
    """The trainer and its workers die at the same moment: no process is left to clean up.

    Torch's workers name their shared memory for a moment while they make it, so each may die in it.
    """
    source = f"""{HEAD}
iterator = iter(DataLoader(Gated(1000), batch_size=100, num_workers=2, prefetch_factor=4))
kept = [next(iterator) for _ in range(3)]
say_pids(iterator)
os.read(reader, 1)
"""
    with running(loader_name, source, tmp_path) as run:
        pids = run.read_pids()
        run.signal_group(signal.SIGKILL)
        run.process.wait()
        assert_all_is_gone(run, pids, loader_name)
        makers = (*pids, run.process.pid)
    files = list(process_traces.SHARED_MEMORY.iterdir())
    assert [path for path in files if "penstock" in path.name] == []
    own = tuple(f"torch_{pid}_" for pid in makers)
    left = [path for path in files if path.name.startswith(own)]
    for path in left:
        path.unlink()
    assert len(left) <= {"torch": len(pids), "penstock": 0}[loader_name]


@pytest.mark.long
def test_classes_of_the_main_module_reach_spawned_workers(loader_name: str, tmp_path: Path) -> None:
    source = """
from torch.utils.data import Dataset
from torch.utils.data import DataLoader

class Squares(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index * index

def shout(samples):
    return [f"{sample}!" for sample in samples]

if __name__ == "__main__":
    print(list(DataLoader(Squares(), batch_size=2, num_workers=1, collate_fn=shout,
                          multiprocessing_context="spawn")))
"""
    with running(loader_name, source, tmp_path) as run:
        assert run.finish() == (0, "[['0!', '1!'], ['4!', '9!']]\n", "")


def test_cycles_of_a_spawned_worker_are_collected_at_its_end(
    loader_name: str, tmp_path: Path
) -> None:
    source = """
import os
from torch.utils.data import DataLoader

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self, write=os.write, line=f"{__name__} is cleared\\n".encode()):
        write(1, line)

cycle = Cycle()

if __name__ == "__main__":
    list(DataLoader(range(4), num_workers=2, multiprocessing_context="spawn"))
"""
    with running(loader_name, source, tmp_path) as run:
        lines = ["__mp_main__ is cleared"] * 2 + ["__main__ is cleared"]
        assert run.finish() == (0, "\n".join([*lines, ""]), "")


@pytest.mark.long
def test_torch_threads_used_before_the_fork_do_no_harm(loader_name: str, tmp_path: Path) -> None:
    """A convolution in the trainer starts threads; workers forked after that compute, too."""
    source = """
import torch
from torch.utils.data import DataLoader

torch.set_num_threads(2)
torch.nn.Conv2d(3, 8, 3)(torch.rand(8, 3, 64, 64)).sum().backward()
images = torch.rand(8, 3, 16, 16)
convolve = torch.nn.Conv2d(3, 1, 3)

class Convolved(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        with torch.no_grad():
            return convolve(images[index])

for _ in range(3):
    print(len(list(DataLoader(Convolved(), batch_size=2, num_workers=2))))
"""
    with running(loader_name, source, tmp_path) as run:
        assert run.finish() == (0, "4\n4\n4\n", "")
