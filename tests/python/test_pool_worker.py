# SPDX-License-Identifier: Apache-2.0
"""`penstock worker` in separate processes: how they start, report, drain, die and reconnect."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import process_traces
import pytest
import torch
from pool_datasets import CODE, digests
from pool_processes import SECONDS_MAX, PoolProcesses, Worker, pool_of
from torch.utils.data import Dataset, TensorDataset

from penstock import DataLoader, Pool, _pool
from penstock.cli.command_line import main
from penstock.pool.pool_status import name_of
from penstock.pool.worker_spec import WorkerAddress, worker_addresses

pytestmark = pytest.mark.slow


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def launch(pool: PoolProcesses, *arguments: str, controller: str | None = None) -> Worker:
    """`penstock worker`, without waiting for anything."""
    where = controller or pool.endpoint
    worker = Worker(["worker", "--controller", where, *arguments], pool.environment)
    pool.processes.append(worker)
    return worker


def free_port(count: int = 1) -> int:
    """The first of this many ports without a listener."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                for number in range(1, count):
                    with socket.socket() as other:
                        other.bind(("127.0.0.1", port + number))
            except (OSError, OverflowError):
                continue
            return port


def wait_until_dead(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(process_traces.is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)


def reported(pool: PoolProcesses, count: int) -> list[dict[str, Any]]:
    """The workers that the controller knows, once there are this many."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        workers: list[dict[str, Any]] = pool.status()["workers"]
        if len(workers) == count:
            return workers
        assert time.monotonic() < deadline, workers


@pytest.mark.long
def test_workers_may_start_before_their_controller(pool: PoolProcesses) -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    worker = launch(pool, "--processes", "2", controller=where)
    said = worker.served(2)
    assert all(
        line.endswith(f"process {pid}")
        for (_, _, pid), line in zip(
            said, worker.wait_for_lines(lambda line: "listens at" in line, 2), strict=True
        )
    )
    unanswered = worker.wait_for_lines(lambda line: "no controller answers" in line, 2)
    assert all(f"penstock controller --bind {where}" in line for line in unanswered)
    pool.start_controller(bind=where)
    workers = reported(pool, 2)
    assert {(each["id"], each["endpoint"]) for each in workers} == {
        (worker_id, endpoint) for worker_id, endpoint, _ in said
    }
    assert f"process {said[0][2]}" in " ".join(each["about"] for each in workers)
    worker.wait_for_lines(lambda line: line.endswith("answers"), 2)
    assert len([line for line in worker.lines if "no controller answers" in line]) == 2


@pytest.mark.long
def test_drained_workers_are_not_restarted(pool: PoolProcesses) -> None:
    worker = pool.start_worker(processes=2)
    first = reported(pool, 2)[0]
    assert _pool.drain_worker(pool.endpoint, None, int(first["id"], 16), SECONDS_MAX)
    reported(pool, 1)
    gone = worker.wait_for_lines(lambda line: line.endswith("ends: this worker was drained"))
    assert f" worker {first['id'][:8]} on " in gone[0]
    ((_, _, pid), (_, _, same_pid)) = worker.served(2)
    assert pid == same_pid
    os.kill(pid, signal.SIGKILL)
    (_, _, (new_id, _, _)) = worker.served(3)
    deadline = time.monotonic() + SECONDS_MAX  # until the one that was killed counts as dead
    while [one["id"] for one in reported(pool, 1)] != [new_id]:
        assert time.monotonic() < deadline
    assert worker.end(signal.SIGTERM) == 0
    assert reported(pool, 0) == []
    assert len(worker.served(3)) == 3, worker.output


@pytest.mark.long
def test_killed_server_is_replaced_with_its_workers(pool: PoolProcesses) -> None:
    port = free_port(2)
    worker = pool.start_worker("--bind", f"tcp://127.0.0.1:{port}", processes=2)
    before = worker.served(2)
    assert sorted(endpoint for _, endpoint, _ in before) == [
        f"tcp://127.0.0.1:{port}",
        f"tcp://127.0.0.1:{port + 1}",
    ]
    (pid,) = {pid for _, _, pid in before}
    os.kill(pid, signal.SIGKILL)
    after = worker.served(4)[2:]
    assert [endpoint for _, endpoint, _ in after] == [endpoint for _, endpoint, _ in before]
    assert len({worker_id for worker_id, _, _ in before + after}) == 4
    assert any("SIGKILL" in line for line in worker.lines)
    (new_pid,) = {pid for _, _, pid in after}
    # No process outlives its supervisor, however that ends.
    worker.process.kill()
    wait_until_dead([new_pid], 10)


@pytest.mark.long
def test_workers_of_one_server_have_distinct_names(pool: PoolProcesses) -> None:
    worker = pool.start_worker(processes=2)
    (_, _, pid), _ = worker.served(2)
    host = socket.gethostname()
    assert {name_of(one) for one in reported(pool, 2)} == {f"{host}/{pid}-1", f"{host}/{pid}-2"}
    assert worker.end() == 0


@pytest.mark.long
def test_failed_process_start_is_retried(pool: PoolProcesses, tmp_path: Path) -> None:
    """/tmp was full, or there was no process number left, when one was to be replaced, and it was
    given up."""
    worker = pool.start_worker(processes=2)
    (doomed,) = worker.pids
    temporary = Path(pool.environment["TMPDIR"])
    temporary.rename(tmp_path / "away")
    os.kill(doomed, signal.SIGKILL)
    said = worker.wait_for_lines(lambda line: "could not be started" in line, 2)
    assert all("No such file or directory" in line and str(temporary) in line for line in said)
    (tmp_path / "away").rename(temporary)
    _, _, new = worker.served(4)[3]
    assert process_traces.is_running(new)
    assert worker.end(signal.SIGTERM) == 0


@pytest.mark.long
def test_keys_of_another_pool_are_reported_once(pool: PoolProcesses) -> None:
    for folder in ("keys", "others"):
        _pool.make_key_folder(str(pool.folder / folder))
    pool.start_controller("--keys", str(pool.folder / "keys"))
    worker = launch(pool, "--keys", str(pool.folder / "others"))
    worker.wait_for_lines(lambda line: "key" in line and pool.endpoint in line and "fail" in line)
    keys = str(pool.folder / "keys")
    for _ in range(3):
        status = json.loads(_pool.pool_status(pool.endpoint, keys, SECONDS_MAX))
        assert status["workers"] == []
    worker.end()
    assert len([line for line in worker.lines if "failed" in line]) == 1, worker.output


@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.long)])
def test_port_in_use_ends_the_command(pool: PoolProcesses, place: int) -> None:
    """Also where other workers of the same command have theirs."""
    port = free_port(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + place))
        taken.listen()
        where = f"tcp://127.0.0.1:{port + place}"
        bind = f"tcp://127.0.0.1:{port}"
        worker = launch(pool, "--processes", "2", "--bind", bind)
        assert worker.wait() == 1
    assert where in worker.output
    assert "Address already in use" in worker.output
    assert "another one starts" not in worker.output


@pytest.mark.long
def test_wrong_worker_arguments_give_error_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PENSTOCK_POOL", raising=False)
    controller = ["--controller", "tcp://127.0.0.1:7"]
    for arguments, code, words in [
        ([], 2, "--controller"),
        (
            [*controller, "--processes", "0"],
            2,
            "--processes must be an integer from 1 to 1024, got '0'",
        ),
        ([*controller, "--patience", "0"], 2, "--patience must be a number of seconds"),
        (["--controller", "tcp://nowhere"], 1, "tcp://HOST:PORT"),
        ([*controller, "--keys", str(tmp_path / "none")], 1, str(tmp_path / "none")),
    ]:
        monkeypatch.setattr(sys, "argv", ["penstock", "worker", *arguments])
        assert main() == code
        assert words in capfd.readouterr().err


class Blocking(Dataset[int]):
    """Reports that it blocks at sample 1, until a file is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        if index == 1:
            Path(self.folder, f"blocked-{os.getpid()}").touch()
            while not Path(self.folder, "go").exists():
                time.sleep(0.01)
        return index


def wait_for_block(folder: Path) -> int:
    """The process that blocks."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        for path in folder.glob("blocked-*"):
            return int(path.name.removeprefix("blocked-"))
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_until_draining(pool: PoolProcesses) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not reported(pool, 1)[0]["is_draining"]:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("signalled", ["parent", "all"])
def test_drained_worker_finishes_its_batch(
    pool: PoolProcesses, tmp_path: Path, signalled: str
) -> None:
    """Slurm and systemd signal the server, too, to which its parent passes the signal on."""
    worker = pool.start_worker()
    loader = DataLoader(Blocking(tmp_path), pool=Pool(pool.endpoint, code_paths=[CODE]), timeout=60)
    batches = iter(loader)
    assert int(next(batches)) == 0
    pid = wait_for_block(tmp_path)
    worker.process.send_signal(signal.SIGTERM)
    wait_until_draining(pool)
    if signalled == "all":
        for server in worker.pids:
            os.kill(server, signal.SIGTERM)
        time.sleep(0.5)  # for a server that ends at once
    assert process_traces.is_running(pid)
    (tmp_path / "go").touch()
    assert int(next(batches)) == 1
    assert worker.wait() == 0
    pool.start_worker()
    assert int(next(batches)) == 2


@pytest.mark.long
def test_second_signal_ends_worker_immediately(pool: PoolProcesses, tmp_path: Path) -> None:
    worker = pool.start_worker()
    loader = DataLoader(Blocking(tmp_path), pool=Pool(pool.endpoint, code_paths=[CODE]), timeout=60)
    batches = iter(loader)
    assert int(next(batches)) == 0
    pid = wait_for_block(tmp_path)
    worker.process.send_signal(signal.SIGINT)
    wait_until_draining(pool)
    assert process_traces.is_running(pid)
    worker.process.send_signal(signal.SIGINT)
    wait_until_dead([pid], 5)
    worker.wait()
    (tmp_path / "go").touch()
    pool.start_worker()
    assert [int(batch) for batch in batches] == [1, 2]


@pytest.mark.long
def test_dataset_above_size_limit_is_rejected_with_advice(pool: PoolProcesses) -> None:
    pool.environment["PENSTOCK_JOB_BYTES"] = "100"
    pool.start_worker()
    loader = DataLoader(TensorDataset(torch.zeros(1000)), pool=pool.endpoint, timeout=60)
    with pytest.raises(Exception, match="PENSTOCK_JOB_BYTES"), pytest.warns(match="JOB_BYTES"):
        digests(loader)


def test_worker_addresses_use_consecutive_ports() -> None:
    controller = "tcp://127.0.0.1:7000"
    assert (
        worker_addresses(controller, None, None, 2)
        == [WorkerAddress("tcp://127.0.0.1:0", None, None, None)] * 2
    )
    assert worker_addresses(controller, "tcp://10.0.0.5:40", None, 2) == [
        WorkerAddress("tcp://10.0.0.5:40", None, None, None),
        WorkerAddress("tcp://10.0.0.5:41", None, None, None),
    ]
    assert worker_addresses(controller, "tcp://*:40", None, 2) == [
        WorkerAddress("tcp://*:40", "tcp://127.0.0.1:40", None, None),
        WorkerAddress("tcp://*:41", "tcp://127.0.0.1:41", None, None),
    ]
    assert worker_addresses(controller, "tcp://0.0.0.0:0", "tcp://node7:0", 1) == [
        WorkerAddress("tcp://0.0.0.0:0", "tcp://node7:0", None, None)
    ]
    assert worker_addresses("tcp://[::1]:7000", None, None, 1) == [
        WorkerAddress("tcp://[::1]:0", None, None, None)
    ]


def test_data_addresses_use_consecutive_ports() -> None:
    controller = "tcp://127.0.0.1:7000"
    addresses = worker_addresses(
        controller, None, None, 2, data_bind="tcp://*:50", data_advertise="tcp://node7:60"
    )
    assert addresses == [
        WorkerAddress("tcp://127.0.0.1:0", None, "tcp://*:50", "tcp://node7:60"),
        WorkerAddress("tcp://127.0.0.1:0", None, "tcp://*:51", "tcp://node7:61"),
    ]
    for options, words in (
        ({"data_bind": "tcp://127.0.0.1:65535"}, "--data-bind must leave .*, got port 65535"),
        ({"data_advertise": "tcp://*:1"}, "--data-advertise must name a single host, got "),
    ):
        with pytest.raises(ValueError, match=words):
            worker_addresses(controller, None, None, 2, **options)


@pytest.mark.parametrize(
    ("controller", "bind", "advertise", "words"),
    [
        ("127.0.0.1:7000", None, None, "an address must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:x", None, "an address must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:7000", None, "tcp://*:50", "must name a single host, got"),
        (
            "tcp://127.0.0.1:7000",
            "tcp://127.0.0.1:65535",
            None,
            "leave a port up to 65535 for each",
        ),
    ],
)
def test_invalid_worker_addresses_are_rejected(
    controller: str, bind: str | None, advertise: str | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        worker_addresses(controller, bind, advertise, 2)
