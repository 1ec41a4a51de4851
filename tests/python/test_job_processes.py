# SPDX-License-Identifier: Apache-2.0
"""The processes of a pool worker: its server, the warm process, and one process per job, which
serves only that job, holds none of the server's resources, and ends with the job."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import namespaces
import process_traces
import pytest
import torch
from ending_datasets import Hanging, Numbers, StartingADaemon
from pool_datasets import CODE, ShardIterator, Shards, StatefulShards, digests
from pool_processes import SECONDS_MAX, PoolProcesses, Worker, pool_of, wait_until
from raw_zeromq import key_bytes
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from penstock import DataLoader, Pool, _pool
from penstock.errors import PenstockError, PoolWarning
from penstock.pool import worker_supervisor
from penstock.pool.worker_supervisor import ServerProgram

pytestmark = pytest.mark.slow

SERVER_PRIVATE_MIB_MAX = 6.0


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcesses]:
    """A pool with one worker, whose server and warm process no job of a test ends."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for opened in pool_of(tmp_path_factory.mktemp("serving"), monkeypatch):
            opened.start_worker()
            yield opened


@pytest.fixture
def worker(serving: PoolProcesses) -> Worker:
    """The worker of `serving`, once the jobs of the test before have ended."""
    (worker,) = (one for one in serving.processes if isinstance(one, Worker))
    wait_until(lambda: not process_traces.children(warm_of(worker)))
    return worker


def pooled(pool: PoolProcesses, dataset: Any, **options: Any) -> DataLoader[Any]:
    given = {"batch_size": None, "timeout": 60, **options}
    of_pool = Pool(pool.endpoint, keys=given.pop("keys", None), code_paths=[CODE])
    return DataLoader(dataset, pool=of_pool, **given)


def expect_served(pool: PoolProcesses) -> None:
    assert list(pooled(pool, Numbers())) == list(range(6))


def private_mib(process: int) -> float:
    """Resident memory without the pages of files, of which the kernel maps more or fewer."""
    status = Path(f"/proc/{process}/status").read_text()
    (kib,) = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kib) / 1024


def server_of(worker: Worker) -> int:
    ((_, _, pid),) = worker.served()
    return pid


def warm_of(worker: Worker) -> int:
    (pid,) = process_traces.children(server_of(worker))
    return pid


def expect_same_server(worker: Worker, pid: int) -> None:
    assert process_traces.is_running(pid)
    assert server_of(worker) == pid
    assert "another one starts" not in worker.output


# ---- A job leaves no trace for the next one


class Looking(Dataset[dict[str, Any]]):
    """The state of its process, as far as a dataset may have changed it."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "dtype": str(torch.get_default_dtype()),
            "folder": os.getcwd(),
            "variable": os.environ.get("SPOILT_BY_TEST", ""),
            "umask": _umask(),
            "threads": [one.name for one in threading.enumerate()],
            "builtins": hasattr(builtins, "spoilt_by_test"),
            "ascii": ascii("x"),
            "relu": torch.nn.functional.relu.__module__,
            "timer": signal.getitimer(signal.ITIMER_REAL),
            "handler": str(signal.getsignal(signal.SIGUSR1)),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "children": len(process_traces.children()),
        }


class Spoiling(Looking):
    """Changes all of that first."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        torch.set_default_dtype(torch.float64)
        os.chdir("/")
        os.environ["SPOILT_BY_TEST"] = "1"
        os.umask(0o007)
        threading.Thread(target=threading.Event().wait, name="leaked", daemon=True).start()
        builtins.spoilt_by_test = True  # type: ignore[attr-defined]
        builtins.ascii = lambda _: "spoilt"
        torch.nn.functional.relu = spoilt_relu
        signal.setitimer(signal.ITIMER_REAL, 10_000)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
        subprocess.Popen(["sleep", "1000"])
        return super().__getitem__(index)


def spoilt_relu(*_: Any, **__: Any) -> Any:
    raise AssertionError


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def look(pool: PoolProcesses, dataset: Any) -> tuple[int, dict[str, Any]]:
    """The process that made the only batch, and the state of that process."""
    (found,) = pooled(pool, dataset)
    return found.pop("pid"), found


def test_process_changes_of_a_job_do_not_reach_other_jobs(
    serving: PoolProcesses, worker: Worker
) -> None:
    """Threads, monkeypatches and limits that one job left behind affected the next in the same
    process."""
    server = server_of(worker)
    first_pid, clean = look(serving, Looking())
    spoilt_pid, spoilt = look(serving, Spoiling())
    assert not [name for name in clean if spoilt[name] == clean[name]]
    last_pid, after = look(serving, Looking())
    assert after == clean
    assert len({first_pid, spoilt_pid, last_pid}) == 3
    expect_same_server(worker, server)


class Signalled(Dataset[str]):
    """Which signals a program that it starts ignores and blocks."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        done = subprocess.run(
            ["cat", "/proc/self/status"], capture_output=True, check=True, text=True
        )
        return done.stdout


def test_programs_started_by_a_dataset_have_default_signals(
    serving: PoolProcesses,
) -> None:
    (status,) = pooled(serving, Signalled())
    for mask in ("SigBlk", "SigIgn"):
        (bits,) = re.findall(rf"^{mask}:\s+([0-9a-f]+)$", status, re.MULTILINE)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            assert not int(bits, 16) >> (number - 1) & 1, (mask, number)


# ---- A job's process that ends


class EndingBy(Numbers):
    """Ends its process at sample 3, only the first time if there is a file to record that."""

    def __init__(self, how: str, mark: Path | None = None) -> None:
        super().__init__()
        self.how = how
        self.mark = None if mark is None else str(mark)

    def __getitem__(self, index: int) -> Any:
        if index == 3 and (self.mark is None or not os.path.exists(self.mark)):
            if self.mark is not None:
                Path(self.mark).touch()
            end_process(self.how)
        return super().__getitem__(index)


def end_process(how: str) -> None:
    print(f"about to end: {how}", file=sys.stderr, flush=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if how == "exit":
        os._exit(5)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os.abort()


ENDS = {
    "exit": "ended with exit code 5",
    "segfault": "was ended by SIGSEGV",
    "kill": "was ended by SIGKILL",
    "abort": "was ended by SIGABRT",
}


def test_batch_that_kills_its_processes_fails_with_the_cause(pool: PoolProcesses) -> None:
    worker = pool.start_worker()
    server = server_of(worker)
    for how, cause in ENDS.items():
        batches = iter(pooled(pool, EndingBy(how)))
        assert [next(batches) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(
            RuntimeError, match=rf"(?s)died.* batch 3 of epoch 1 .*{cause}"
        ) as caught:
            next(batches)
        assert re.search(rf"(?s)its last output: .*about to end: {how}", str(caught.value))
        del batches
        expect_same_server(worker, server)
        worker.wait_for_lines(ends_by(cause))
        assert worker.wait_for_lines(says(f"about to end: {how}"), 3)
    expect_served(pool)
    expect_same_server(worker, server)
    assert worker.end() == 0


def ends_by(cause: str) -> Callable[[str], bool]:
    return lambda line: "a job process of trainer " in line and cause in line


def says(text: str) -> Callable[[str], bool]:
    return lambda line: line == text


class Regression(EndingBy):
    """Pairs to fit a line to."""

    def __init__(self, how: str, mark: Path) -> None:
        super().__init__(how, mark)
        generator = torch.Generator().manual_seed(1)
        self.values = torch.randn(self.count, 6, generator=generator)

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return self.values[index], self.values[index].sum().sin()


def losses_of(loader: Any) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(2):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs).squeeze(1), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("how", ["exit", pytest.param("segfault", marks=pytest.mark.long)])
def test_training_after_a_process_death_has_torch_losses(
    serving: PoolProcesses, worker: Worker, tmp_path: Path, how: str
) -> None:
    server = server_of(worker)
    mark, there = tmp_path / "mark", tmp_path / "there"
    there.touch()
    order = [5, 0, 3, 1, 4, 2] * 3
    plain = torch.utils.data.DataLoader(Regression(how, there), batch_size=2, sampler=order)
    expected = losses_of(plain)
    assert len(set(expected)) == len(expected) == 18
    loader = pooled(serving, Regression(how, mark), batch_size=2, sampler=order)
    assert losses_of(loader) == expected
    assert mark.exists()
    expect_same_server(worker, server)


class DyingShards(Shards):
    """Ends its process once, in the middle of an epoch."""

    def __init__(self, count: int, mark: Path) -> None:
        super().__init__(count)
        self.mark = str(mark)

    def __iter__(self) -> Iterator[Any]:
        for number, values in super().__iter__():
            die_once(number, self.count, self.mark)
            yield number, values


class DyingStatefulShards(StatefulShards):
    """The same for a job that resumes from its state."""

    def __init__(self, count: int, mark: Path) -> None:
        super().__init__(count)
        self.mark = str(mark)

    def __iter__(self) -> ShardIterator:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return DyingIterator(list(range(start, self.count, step)), self.count, self.mark)


class DyingIterator(ShardIterator):
    def __init__(self, numbers: list[int], count: int, mark: str) -> None:
        super().__init__(numbers)
        self._count = count
        self._mark = mark

    def __next__(self) -> torch.Tensor:
        if self._place < len(self._numbers):
            die_once(self._numbers[self._place], self._count, self._mark)
        return super().__next__()


def die_once(number: int, count: int, mark: str) -> None:
    if number == count // 2 and not os.path.exists(mark):
        Path(mark).touch()
        end_process("kill")


@pytest.mark.parametrize(
    "make", [DyingShards, pytest.param(DyingStatefulShards, marks=pytest.mark.long)]
)
def test_shards_resume_bit_for_bit_after_a_process_death(
    serving: PoolProcesses, worker: Worker, tmp_path: Path, make: Any
) -> None:
    server = server_of(worker)
    mark, there = tmp_path / "mark", tmp_path / "there"
    there.touch()
    options: dict[str, Any] = {"batch_size": 4, "shards": 3}
    torch.manual_seed(7)
    expected = digests(DataLoader(make(96, there), seeding="batch", **options))
    torch.manual_seed(7)
    assert digests(pooled(serving, make(96, mark), **options)) == expected
    assert mark.exists()
    expect_same_server(worker, server)


# ---- Resources of each process


def libraries_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except PermissionError:  # its memory is readable by root only
        program = ServerProgram(is_quiet=True)._path
        done = subprocess.run(["ldd", str(program)], capture_output=True, check=True, text=True)
        return done.stdout


def test_server_loads_no_python_and_no_torch(pool: PoolProcesses) -> None:
    worker = pool.start_worker()
    expect_served(pool)
    libraries = libraries_of(server_of(worker))
    assert "libzmq" in libraries
    assert not re.search(r"libtorch|libc10|libpython|_C\.", libraries)
    assert private_mib(server_of(worker)) < SERVER_PRIVATE_MIB_MAX
    assert "libtorch" in libraries_of(warm_of(worker))


class Blocking(Numbers):
    """Reports which process makes it, and continues once there is a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def __getitem__(self, index: int) -> Any:
        Path(self.folder, f"process-{os.getpid()}").touch()
        while not Path(self.folder, "go").exists():
            time.sleep(0.01)
        return index


class BlockingStream(IterableDataset[int]):
    """The same as one shard, which one worker reads."""

    def __init__(self, folder: Path) -> None:
        self.blocking = Blocking(folder)

    def __iter__(self) -> Iterator[int]:
        return (self.blocking[index] for index in range(len(self.blocking)))


def process_in(folder: Path) -> int:
    wait_until(lambda: any(folder.glob("process-*")))
    (path,) = folder.glob("process-*")
    return int(path.name.removeprefix("process-"))


def tcp_sockets() -> set[str]:
    """All sockets of this machine, as links of /proc/PID/fd name them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            lines = Path(table).read_text().splitlines()[1:]
            found |= {f"socket:[{line.split()[9]}]" for line in lines}
    return found


def found_in_memory(pid: int, wanted: dict[str, list[bytes]]) -> set[str]:
    """The names of which any byte string is in the process's private memory."""
    found = set()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, mode, *_ = line.split()
            if mode != "rw-p":
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            with contextlib.suppress(OSError):  # device pages, and released memory
                memory.seek(start)
                held = memory.read(end - start)
                found |= {
                    name for name, forms in wanted.items() if any(one in held for one in forms)
                }
    return found


def test_job_process_holds_no_keys_or_sockets_of_the_pool(
    pool: PoolProcesses, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    _pool.make_key_folder(str(keys))
    controller = pool.start_controller("--keys", str(keys))
    worker = pool.start_worker("--keys", str(keys))
    batches = iter(pooled(pool, Blocking(tmp_path), keys=str(keys)))
    job = process_in(tmp_path)
    assert process_traces.children(warm_of(worker)) == [job]
    secrets = {
        path.name: [path.read_bytes().strip(), key_bytes(keys, path.name)]
        for path in keys.glob("*.secret")
    }
    assert "controller.secret" in found_in_memory(controller.process.pid, secrets)
    sockets = tcp_sockets()
    for pid in (job, warm_of(worker)):
        links = [entry.partition(" -> ")[2] for entry in process_traces.descriptors(pid)]
        assert any(link.startswith("socket:") for link in links)  # to the server
        assert sockets.isdisjoint(links)
        for file in ("environ", "cmdline"):
            text = Path(f"/proc/{pid}/{file}").read_bytes()
            assert not [name for name, (secret, _) in secrets.items() if secret in text]
        assert found_in_memory(pid, secrets) == set()
    (tmp_path / "go").touch()
    assert list(batches) == list(range(6))


def test_workers_of_one_command_share_a_server_and_a_warm_process(
    pool: PoolProcesses, tmp_path: Path
) -> None:
    """Each had both to itself, and with the latter several hundred megabytes."""
    worker = pool.start_worker(processes=3)
    ids = [worker_id for worker_id, _, _ in worker.served(3)]
    (server,) = {pid for _, _, pid in worker.served(3)}
    (warm,) = process_traces.children(server)
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    batches = [iter(pooled(pool, BlockingStream(folder), shards=1)) for folder in folders]
    jobs = [process_in(folder) for folder in folders]
    assert sorted(process_traces.children(warm)) == sorted(jobs)
    os.kill(jobs[1], signal.SIGKILL)
    wait_until(lambda: len(list(folders[1].glob("process-*"))) == 2)  # another job has started
    for folder in folders:
        (folder / "go").touch()
    assert [list(each) for each in batches] == [list(range(6))] * 3
    assert process_traces.children(server) == [warm]
    (line,) = worker.wait_for_lines(lambda line: "a job process of" in line)
    assert any(f"penstock worker {worker_id[:8]} on " in line for worker_id in ids)
    del batches
    wait_until(lambda: process_traces.children(warm) == [])
    assert worker.end() == 0
    assert len(worker.wait_for_lines(lambda line: "ends: this worker was drained" in line)) == 3


# ---- When they end


def test_job_process_ends_when_its_trainer_leaves(serving: PoolProcesses, worker: Worker) -> None:
    batches = iter(pooled(serving, Numbers()))
    assert next(batches) == 0
    warm = warm_of(worker)
    assert len(process_traces.children(warm)) == 1
    assert any((serving.folder / "tmp").glob("penstock-code-*/*"))
    del batches
    wait_until(lambda: process_traces.children(warm) == [])
    wait_until(lambda: not any((serving.folder / "tmp").glob("penstock-code-*/*")))


def test_alternating_loaders_keep_their_job_processes(
    serving: PoolProcesses, worker: Worker
) -> None:
    """Each turn started a process, which had to read its dataset again."""
    training, validation = pooled(serving, Looking()), pooled(serving, Looking())
    turns = [[found["pid"] for found in loader] for loader in (training, validation) * 2]
    assert turns == turns[:2] * 2
    assert turns[0] != turns[1]
    jobs = [pid for turn in turns[:2] for pid in turn]
    warm = warm_of(worker)
    assert sorted(process_traces.children(warm)) == sorted(jobs)
    del training, validation  # also the idle process ends immediately
    wait_until(lambda: not process_traces.children(warm))


def terminate_the_supervisor(worker: Worker, server: int, warm: int) -> None:
    assert worker.end(signal.SIGTERM) == 0


def kill_the_supervisor(worker: Worker, server: int, warm: int) -> None:
    worker.end(signal.SIGKILL)


def kill_the_server(worker: Worker, server: int, warm: int) -> None:
    os.kill(server, signal.SIGKILL)


def kill_the_warm_process(worker: Worker, server: int, warm: int) -> None:
    os.kill(warm, signal.SIGKILL)


@pytest.mark.parametrize("how", ["sleep", pytest.param("call", marks=pytest.mark.long)])
def test_all_processes_end_with_their_worker(pool: PoolProcesses, tmp_path: Path, how: str) -> None:
    """Also with a dataset that hangs, and while the interpreter's lock is held. The worker of a
    killed process starts again, and serves the job."""
    worker = pool.start_worker("--grace", "1")
    for number, end in enumerate(
        (kill_the_server, kill_the_warm_process, terminate_the_supervisor, kill_the_supervisor)
    ):
        folder = tmp_path / end.__name__
        folder.mkdir()
        batches = iter(pooled(pool, Hanging(how, folder)))
        assert [next(batches) for _ in range(3)] == [0, 1, 2]
        wait_until((folder / "hangs").exists)
        *_, (_, _, server) = worker.served()
        (warm,) = process_traces.children(server)
        jobs = process_traces.children(warm)
        assert len(jobs) == 1
        end(worker, server, warm)
        assert process_traces.wait_gone([server, warm, *jobs], SECONDS_MAX) == []
        (folder / "go").touch()
        if end in (kill_the_server, kill_the_warm_process):
            assert len(worker.served(2 + number)) == 2 + number
        else:
            worker = pool.start_worker("--grace", "1")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PoolWarning)  # that there was no worker for a while
            assert list(batches) == [3, 4, 5]
        del batches


# ---- Processes that a job leaves running


def daemon_in(folder: Path) -> int:
    wait_until((folder / "daemon").exists)
    return int((folder / "daemon").read_text())


def test_daemon_started_by_a_dataset_ends_with_its_job(
    serving: PoolProcesses, worker: Worker, tmp_path: Path
) -> None:
    """It was in a separate session, and survived."""
    server = server_of(worker)
    batches = iter(pooled(serving, StartingADaemon(tmp_path)))
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    daemon = daemon_in(tmp_path)
    assert process_traces.is_running(daemon)
    (tmp_path / "go").touch()
    assert list(batches) == [3, 4, 5]
    assert process_traces.is_running(daemon)
    del batches
    assert process_traces.wait_gone([daemon], SECONDS_MAX) == []
    expect_same_server(worker, server)


def kill_the_job(worker: Worker, server: int, warm: int) -> None:
    (job,) = process_traces.children(warm)
    os.kill(job, signal.SIGKILL)


@pytest.mark.parametrize(
    "last_end",
    [
        kill_the_server,
        pytest.param(kill_the_supervisor, marks=pytest.mark.long),
        pytest.param(terminate_the_supervisor, marks=pytest.mark.long),
    ],
)
def test_daemon_ends_with_any_process_of_its_worker(
    pool: PoolProcesses, tmp_path: Path, last_end: Callable[[Worker, int, int], None]
) -> None:
    worker = pool.start_worker("--grace", "1")
    for end in (kill_the_job, kill_the_warm_process, last_end):
        folder = tmp_path / end.__name__
        folder.mkdir()
        batches = iter(pooled(pool, StartingADaemon(folder)))
        assert next(batches) == 0
        daemon = daemon_in(folder)
        *_, (_, _, server) = worker.served()
        (warm,) = process_traces.children(server)
        end(worker, server, warm)
        assert process_traces.wait_gone([daemon], SECONDS_MAX) == []
        if end is kill_the_job:
            expect_same_server(worker, server)
        if end is kill_the_warm_process:
            worker.served(2)  # again
        del batches


# ---- Output of a job


class Flooding(Numbers):
    """Writes 16 MiB to standard output, or to standard error, with each sample."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.fd = fd

    def __getitem__(self, index: int) -> Any:
        line = b"flood " * 15 + b"\n"
        left = 16 << 20
        while left > 0:
            left -= os.write(self.fd, line * 512)
        return index


@pytest.mark.parametrize("fd", [1, 2])
def test_flood_of_output_is_truncated_in_the_log(pool: PoolProcesses, fd: int) -> None:
    """Its whole standard output appeared in the log."""
    worker = pool.start_worker()
    server = server_of(worker)
    assert list(pooled(pool, Flooding(fd))) == list(range(6))
    expect_served(pool)
    worker.wait_for_lines(lambda line: "bytes of job output are omitted" in line)
    expect_same_server(worker, server)
    assert worker.output.count("flood") > 100
    assert len(worker.output) < 8 << 20


class FillingItsDisk(Numbers):
    """Writes to a disk at sample 3 until it is full."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            print("about to fill the disk", file=sys.stderr, flush=True)
            with open(Path(self.folder, "file"), "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 20))
        return index


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    try:
        namespaces.need("mount", "umount")
        # Larger than this repository: the test's working folder may travel as its program's code.
        namespaces.run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder))
    except namespaces.NotHere as reason:
        pytest.skip(str(reason))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_full_disk_fails_only_the_job_that_filled_it(
    serving: PoolProcesses, worker: Worker, small_disk: Path
) -> None:
    server = server_of(worker)
    batches = iter(pooled(serving, FillingItsDisk(small_disk)))
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="No space left on device"):
        next(batches)
    del batches
    assert worker.wait_for_lines(lambda line: line == "about to fill the disk")
    expect_served(serving)
    expect_same_server(worker, server)


@pytest.mark.long
def test_job_without_disk_space_for_its_code_fails_alone(
    pool: PoolProcesses, small_disk: Path
) -> None:
    """A job before it has filled the worker's temporary folder."""
    pool.environment["TMPDIR"] = str(small_disk)
    worker = pool.start_worker()
    server = server_of(worker)
    with pytest.raises(OSError, match="No space left on device"):
        FillingItsDisk(small_disk)[3]
    with pytest.raises(Exception, match="No space left on device"):
        list(pooled(pool, Numbers()))
    (small_disk / "file").unlink()
    expect_served(pool)
    expect_same_server(worker, server)


# ---- Starting one


@pytest.mark.long
def test_refused_fork_does_not_end_the_worker(pool: PoolProcesses) -> None:
    worker = pool.start_altered_worker("refuse_forks", "2")  # the first is a test of whether it can
    server = server_of(worker)
    expect_served(pool)
    worker.wait_for_lines(lambda line: "a job process could not be started" in line)
    expect_same_server(worker, server)


def test_missing_server_program_is_reported_with_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker_supervisor._pool, "__file__", str(tmp_path / "_pool.so"))
    where = re.escape(str(tmp_path / "penstock-server"))
    with pytest.raises(PenstockError, match=f"{where}.*reinstall penstock"):
        ServerProgram(is_quiet=False)
