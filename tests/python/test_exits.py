# SPDX-License-Identifier: Apache-2.0
"""Ends that torch's loader does not promise: orphans are gone soon, in every state."""

from __future__ import annotations

import signal
from pathlib import Path

import process_traces
import pytest
from script_runs import ORPHAN_SECONDS_MAX, running

pytestmark = pytest.mark.slow

# Torch waits 5 s for each of four workers, one after the other.
JOIN_SECONDS_MAX = 15

HEAD = """
import atexit, ctypes, os, signal, sys, threading, time
import torch
from torch.utils.data import Dataset
from torch.utils.data import DataLoader

reader, writer = os.pipe()
free_reader, free_writer = os.pipe()

class Rows(Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if index >= 8:
            busy()
        return torch.full((1000,), float(index))

def say_pids(*iterators):
    print(*(worker.pid for it in iterators for worker in it._workers), flush=True)
"""

BUSY = {
    "reads a pipe for ever": "os.read(reader, 1)",
    "loops in Python": "exec('while True: pass')",
    "sleeps in C with the interpreter's lock": "ctypes.PyDLL(None).pause()",
    "ignores signals": """[signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)),
                           os.read(reader, 1)]""",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", BUSY)
def test_busy_workers_exit_after_their_trainer_is_killed(what: str, tmp_path: Path) -> None:
    source = f"""{HEAD}
def busy():
    os.write(free_writer, b"!")
    {BUSY[what]}

iterator = iter(DataLoader(Rows(), batch_size=2, num_workers=2))
kept = [next(iterator) for _ in range(4)]
os.read(free_reader, 1), os.read(free_reader, 1)
say_pids(iterator)
os.read(reader, 1)
"""
    with running("penstock", source, tmp_path) as run:
        pids = run.read_pids()
        run.signal(signal.SIGKILL)
        run.process.wait()
        assert process_traces.wait_gone(pids, ORPHAN_SECONDS_MAX) == []
        assert run.left_files() == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("options", ["", "pool='tcp://127.0.0.1:9', seeding='batch'"])
def test_spawned_workers_exit_after_their_trainer_is_killed(
    options: str, method: str, tmp_path: Path
) -> None:
    """A worker made by a fork server is not the trainer's child: its parent stays alive. One is
    busy in its dataset for long when the trainer is killed."""
    source = f"""{HEAD}
import multiprocessing, time

class Hanging(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if index == 6:
            time.sleep(1000)
        return torch.tensor(index)

if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    loader = DataLoader(
        Hanging(), batch_size=2, num_workers=2, multiprocessing_context=context, {options}
    )
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(3)]
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.read(reader, 1)
"""
    with running("penstock", source, tmp_path) as run:
        pids = run.read_pids()
        assert len(pids) == 2
        run.signal(signal.SIGKILL)
        run.process.wait()
        assert process_traces.wait_gone(pids, ORPHAN_SECONDS_MAX) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["os._exit(5)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_trainer_exiting_without_cleanup_leaves_nothing(how: str, tmp_path: Path) -> None:
    source = f"""{HEAD}
iterator = iter(DataLoader(torch.arange(1000.0), batch_size=2, num_workers=2))
kept = next(iterator)
say_pids(iterator)
{how}
"""
    with running("penstock", source, tmp_path) as run:
        pids = run.read_pids()
        code, out, error = run.finish()
        assert code == (5 if "_exit" in how else -signal.SIGTERM)
        assert (out, error) == ("", "")
        assert process_traces.wait_gone(pids, ORPHAN_SECONDS_MAX) == []
        assert run.left_files() == []


@pytest.mark.long
def test_workers_starting_after_their_trainer_died_exit(tmp_path: Path) -> None:
    """Their parent had already changed when they first looked, and so never changed again."""
    source = f"""{HEAD}
import multiprocessing, random

trainer = os.getpid()
seed = random.seed

def seed_when_the_trainer_is_dead(value):
    # The first thing that a worker does; the pipe ends when the last process closes it.
    if os.getpid() != trainer:
        os.close(writer)
        os.read(reader, 1)
    seed(value)

random.seed = seed_when_the_trainer_is_dead

class Dying(multiprocessing.context.ForkContext):
    started = []

    def Process(self, *args, **kwargs):
        if len(self.started) == 2:
            print(*(process.pid for process in self.started), flush=True)
            os._exit(5)
        self.started.append(super().Process(*args, **kwargs))
        return self.started[-1]

iter(DataLoader(torch.arange(10.0), num_workers=3, multiprocessing_context=Dying()))
"""
    with running("penstock", source, tmp_path) as run:
        pids = run.read_pids()
        assert process_traces.wait_gone(pids, ORPHAN_SECONDS_MAX) == []
        assert run.finish() == (5, "", "")


def test_ctrl_c_does_not_wait_for_busy_workers(tmp_path: Path) -> None:
    """Torch's loader gives each of them 5 s."""
    source = f"""{HEAD}
def busy():
    os.read(reader, 1)

iterator = iter(DataLoader(Rows(), batch_size=2, num_workers=2))
kept = [next(iterator) for _ in range(4)]
say_pids(iterator)
next(iterator)
"""
    with running("penstock", source, tmp_path) as run:
        pids = run.read_pids()
        run.signal_group(signal.SIGINT)
        code, _, error = run.finish()
        assert code == -signal.SIGINT
        assert error.count("Traceback") == 1
        assert process_traces.wait_gone(pids, ORPHAN_SECONDS_MAX) == []


@pytest.mark.long
def test_busy_workers_are_joined_within_one_common_timeout(
    tmp_path: Path,
) -> None:
    source = f"""{HEAD}
def busy():
    os.write(free_writer, b"!")
    os.read(reader, 1)

iterator = iter(DataLoader(Rows(), batch_size=1, num_workers=4, prefetch_factor=2))
kept = [next(iterator) for _ in range(8)]
for _ in range(4):  # each worker is in the dataset's hands
    os.read(free_reader, 1)
say_pids(iterator)
begin = time.monotonic()
del iterator
print(time.monotonic() - begin < {JOIN_SECONDS_MAX}, flush=True)
"""
    with running("penstock", source, tmp_path) as run:
        pids = run.read_pids()
        assert run.finish() == (0, "True\n", "")
        assert process_traces.wait_gone(pids, ORPHAN_SECONDS_MAX) == []


@pytest.mark.long
def test_daemon_threads_waiting_for_batches_do_not_abort_the_exit(tmp_path: Path) -> None:
    """The program's exit code is unchanged, and threads print no errors."""
    source = f"""{HEAD}
def busy():
    os.read(reader, 1)

def consume(iterator):
    for batch in iterator:
        pass

def waits(iterator):
    return iterator.counters()["waits"]

iterators = [iter(DataLoader(Rows(), batch_size=2, num_workers=1)) for _ in range(6)]
for iterator in iterators:
    threading.Thread(target=consume, args=(iterator,), daemon=True).start()
# All are inside of the wait for the fifth batch. A thread inside of one of torch's operators when
# Python goes down aborts the process, with torch's loader as well.
for iterator in iterators:
    while iterator.counters()["batches"] < 4:
        pass
    before = waits(iterator)
    while waits(iterator) < before + 3:
        pass
say_pids(*iterators)
sys.exit(4)
"""
    with running("penstock", source, tmp_path) as run:
        pids = run.read_pids()
        code, out, error = run.finish()
        assert (code, out) == (4, ""), error
        assert process_traces.wait_gone(pids, ORPHAN_SECONDS_MAX) == []


def test_offloaded_models_print_nothing_at_interpreter_exit(tmp_path: Path) -> None:
    """Each of them complained that its loader was gone, after the modules had been cleared."""
    source = f"""{HEAD}
import penstock

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1000, 2)
    def forward(self, x):
        return self.net(x * 2.0 - 1.0)

def busy():
    pass

plain, function, compiled, scripted = (Model() for _ in range(4))
options = dict(batch_size=2, num_workers=1, sampler=range(8))
loaders = [DataLoader(Rows(), persistent_workers=kept, **options) for kept in (True, False)]
offloaded = [
    penstock.offload(model, loader, cut="maximal")
    for loader in loaders
    for model in (
        plain,
        lambda x: function(x / 2.0),
        torch.compile(compiled, backend="eager"),
        torch.jit.script(scripted),
    )
]
for loader in loaders:
    for batch in loader:
        for model in offloaded:
            model(batch)
    print(bool(loader.plan.moved))
in_use = iter(loaders[0])
next(in_use)
"""
    with running("penstock", source, tmp_path) as run:
        assert run.finish() == (0, "True\nTrue\n", "")


@pytest.mark.long
def test_loaders_used_at_interpreter_exit_do_not_hang_or_print(tmp_path: Path) -> None:
    source = f"""{HEAD}
in_use = iter(DataLoader(torch.arange(1000.0), num_workers=1))
next(in_use)

@atexit.register
def use_loaders():
    print(int(next(in_use)), flush=True)
    print(len(list(DataLoader(torch.arange(10.0), batch_size=5, num_workers=1))), flush=True)

class Late:
    def __init__(self, iterator):
        self.iterator = iterator
    def __del__(self):
        del self.iterator

late = Late(iter(DataLoader(torch.arange(1000.0), num_workers=1)))
say_pids(in_use, late.iterator)
"""
    with running("penstock", source, tmp_path) as run:
        pids = run.read_pids()
        assert run.finish() == (0, "1\n2\n", "")
        assert process_traces.wait_gone(pids, ORPHAN_SECONDS_MAX) == []
        assert run.left_files() == []


@pytest.mark.long
def test_child_outliving_the_trainer_keeps_batches_but_no_worker(
    tmp_path: Path,
) -> None:
    """It inherited the trainer's ends of all sockets, so these do not show the death."""
    source = f"""{HEAD}
iterator = iter(DataLoader(torch.arange(1000.0), batch_size=10, num_workers=2))
other = iter(DataLoader(torch.arange(1000.0), batch_size=10, num_workers=1))
kept = [next(iterator) for _ in range(3)]
say_pids(iterator, other)
if os.fork() == 0:
    sys.stdin.readline()
    print([int(batch[0]) for batch in kept], flush=True)
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with running("penstock", source, tmp_path) as run:
        pids = run.read_pids()
        assert process_traces.wait_gone(pids, ORPHAN_SECONDS_MAX) == []
        run.write_line("go on")
        assert run.read_line() == "[0, 10, 20]"


JOINING = """
import multiprocessing.process

join = multiprocessing.process.BaseProcess.join

def told_join(process, timeout=None):
    multiprocessing.process.BaseProcess.join = join
    print("joining", flush=True)
    return join(process, timeout)

multiprocessing.process.BaseProcess.join = told_join
"""


@pytest.mark.long
def test_ctrl_c_while_joining_workers_reaches_the_program(
    tmp_path: Path,
) -> None:
    """It printed "Exception ignored in: <function LocalPoolIter.__del__" and was dropped."""
    source = f"""{HEAD}{JOINING}
def busy():
    os.read(reader, 1)

iterator = iter(DataLoader(Rows(), batch_size=2, num_workers=2))
kept = [next(iterator) for _ in range(4)]
say_pids(iterator)
try:
    del iterator
    for _ in range(10):
        pass
    print("not interrupted", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    with running("penstock", source, tmp_path) as run:
        pids = run.read_pids()
        assert run.read_line() == "joining"
        run.signal(signal.SIGINT)
        assert run.read_line() == "interrupted"
        assert run.finish() == (0, "", "")
        assert process_traces.wait_gone(pids, ORPHAN_SECONDS_MAX) == []
