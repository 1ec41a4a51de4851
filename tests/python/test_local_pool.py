# SPDX-License-Identifier: Apache-2.0
"""penstock run --pool-local: the pool of one program, which ends with the program, for any
reason."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import process_traces
import pytest
from pool_processes import SECONDS_MAX, Process
from process_traces import wait_gone
from script_runs import BY_FORK

pytestmark = pytest.mark.slow

MARK = "PENSTOCK_TEST_PROGRAM"
# The program's local worker is slow, so that the pool's workers get their turn.
TRAINING = """
    import os, sys, time
    from torch.utils.data import DataLoader, Dataset

    class Squares(Dataset):
        program = os.getpid()
        def __len__(self): return 60
        def __getitem__(self, index):
            is_own = os.getppid() == self.program
            time.sleep(0.5 if is_own else 0.01)
            return index * index, is_own

    loader = DataLoader(Squares(), batch_size=3, num_workers=1)
    batches = list(loader)
    values = [value for squares, _ in batches for value in squares.tolist()]
    own_count = sum(int(is_own.sum()) for _, is_own in batches)
"""


class Programs:
    """Programs under ``penstock run``, whose processes are recognised by a variable that each
    program sets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "run").mkdir(mode=0o700)
        (folder / "tmp").mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
        for name in ("PENSTOCK_POOL", "PENSTOCK_KEYS", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        self._mark = uuid.uuid4().hex
        self.environment = {**os.environ, MARK: self._mark, "TMPDIR": str(folder / "tmp")}

    def start(self, *arguments: str, source: str) -> Process:
        (self.folder / "train.py").write_text(BY_FORK + textwrap.dedent(source))
        # A background process of a script ignores SIGINT, and so do its children.
        return Process(
            [*arguments],
            self.environment,
            folder=self.folder,
            program=("env", "--default-signal=INT", sys.executable, "-m", "penstock", "run"),
        )

    def pids(self, command: str = "") -> set[int]:
        """The processes of all programs, with ``command`` in their command lines."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    environ = (entry / "environ").read_bytes().split(b"\0")
                    line = (entry / "cmdline").read_text()
                except OSError:
                    continue
                if f"{MARK}={self._mark}".encode() in environ and command in line:
                    found.add(int(entry.name))
        return found

    def warm_pids(self) -> set[int]:
        """One for each pool: the processes of jobs are its children, with the same command."""
        pids = self.pids("run_warm")
        return pids - {child for pid in pids for child in process_traces.children(pid)}

    def wait_gone(self) -> None:
        """Waits until none of them is left."""
        wait_gone(self.pids(), SECONDS_MAX)
        assert self.pids() == set()

    def end(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.wait_gone()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    started = Programs(tmp_path, monkeypatch)
    yield started
    started.end()


def test_program_pool_serves_batches_and_ends_with_it(
    programs: Programs,
) -> None:
    """The program does not see the processes of the pool among its children either."""
    ending = """
    print(values == [index * index for index in range(60)], loader.stats().iterator)
    print("of the pool:", own_count < 60)
    try:
        os.wait()
    except ChildProcessError:
        print("no children")
    sys.exit(7)
    """
    program = programs.start("--pool-local", "2", "train.py", source=TRAINING + ending)
    assert program.wait() == 7, program.output
    assert programs.pids() == set(), "the command has ended, and the pool has not"
    assert list((programs.folder / "tmp").iterdir()) == []
    pool, stream, *lines = program.lines
    assert 'random numbers of seeding="batch"' in stream
    assert lines == ["True pool", "of the pool: True", "no children"]
    assert re.fullmatch(
        r"penstock run: a pool of 2 workers on this machine, controller at tcp://127\.0\.0\.1:\d+",
        pool,
    )


@pytest.mark.long
@pytest.mark.parametrize(("options", "count"), [("", 1), ("seeding='batch'", 0)])
def test_pool_random_number_notice_is_printed_once(
    programs: Programs, options: str, count: int
) -> None:
    """Its first loss was 1.6159 instead of 1.6055, without any explanation."""
    program = programs.start(
        "--pool-local",
        "1",
        "train.py",
        source=f"""
        import torch
        from penstock import DataLoader

        dataset = torch.utils.data.TensorDataset(torch.arange(8))
        for _ in range(2):
            for loader in (DataLoader(dataset, num_workers=1, {options}) for _ in range(2)):
                assert len(list(loader)) == 8
        """,
    )
    assert program.wait() == 0, program.output
    said = [line for line in program.lines if 'random numbers of seeding="batch"' in line]
    assert len(said) == count, program.output


@pytest.mark.long
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name
)
def test_program_ended_by_signal_leaves_no_pool(programs: Programs, number: int) -> None:
    waiting = """
    print("trained", flush=True)
    while True: time.sleep(0.05)
    """
    program = programs.start("--pool-local", "2", "train.py", source=TRAINING + waiting)
    program.wait_for_lines(lambda line: line == "trained")
    assert len(programs.warm_pids()) == 1
    assert len(programs.pids("run_local_pool")) == 1
    assert program.end(number) == -number
    programs.wait_gone()


@pytest.mark.long
def test_hanging_worker_does_not_outlive_its_program(programs: Programs) -> None:
    source = """
    import os, signal, time
    from torch.utils.data import DataLoader, Dataset

    class Hanging(Dataset):
        def __len__(self): return 100
        def __getitem__(self, index):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            # One write: an unbuffered print writes the end of its line after the line, and
            # another worker's line may come between.
            os.write(1, b"hangs\\n")
            time.sleep(1000)

    next(iter(DataLoader(Hanging(), num_workers=1)))
    """
    program = programs.start("--pool-local", "2", "train.py", source=source)
    program.wait_for_lines(lambda line: line == "hangs", count=3)
    assert program.end(signal.SIGKILL) == -signal.SIGKILL
    programs.wait_gone()


def test_program_continues_when_its_pool_is_killed(programs: Programs) -> None:
    source = """
    import os, time
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(range(2000), batch_size=2, num_workers=1))
    first = next(batches)
    print("has begun", flush=True)
    while not os.path.exists("killed"): time.sleep(0.05)
    print(len([first, *batches]))
    """
    program = programs.start("--pool-local", "2", "train.py", source=source)
    program.wait_for_lines(lambda line: line == "has begun")
    (keeper,) = programs.pids("run_local_pool")
    workers = programs.pids("run_warm")
    os.kill(keeper, signal.SIGKILL)
    assert wait_gone([keeper, *workers], SECONDS_MAX) == []
    (programs.folder / "killed").touch()
    assert program.wait() == 0, program.output
    assert program.lines[-1] == "1000"
    programs.wait_gone()


def test_pool_start_failure_prevents_the_program(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.environment["PENSTOCK_KEYS"] = str(programs.folder / "none")
    program = programs.start("--pool-local", "1", "train.py", source="print('it runs')")
    assert program.wait() == 1
    assert program.output.startswith("penstock run: --pool-local 1: ")
    assert str(programs.folder / "none") in program.output
    assert "it runs" not in program.output


@pytest.mark.long
def test_torchrun_ranks_share_the_pool(programs: Programs) -> None:
    source = """
    import os
    import torch.distributed
    from torch.utils.data import DataLoader
    from penstock import Ranks

    torch.distributed.init_process_group("gloo")
    loader = DataLoader(range(8), batch_size=2, num_workers=1, ranks=Ranks())
    total = sum(batch.sum() for batch in loader)
    torch.distributed.all_reduce(total)
    print(f"{int(total)} {loader.stats().iterator} {os.environ['PENSTOCK_POOL']}", flush=True)
    torch.distributed.destroy_process_group()
    """
    program = programs.start(
        "--pool-local", "2", "-m", "torch.distributed.run", "--nproc-per-node=2",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1",
        "-m", "penstock", "run", "train.py", source=source,
    )  # fmt: skip
    assert program.wait() == 0, program.output
    assert programs.pids() == set()
    pool = re.search(r"controller at (\S+)", program.output)
    assert pool is not None
    told = [line for line in program.lines if line == f"28 pool {pool[1]}"]
    assert len(told) == 2, program.output
