# SPDX-License-Identifier: Apache-2.0
"""`penstock up` and `penstock down`: which state they recover, and which requests they reject."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_pools import ON_A_FULL_DISK, Elastic, expected, free_disk, full_disk
from engine_pools import kill_family
from namespaces import NotHere, tiny_folder
from pool_processes import Process

pytestmark = pytest.mark.slow


@pytest.fixture
def elastic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elastic]:
    one = Elastic(tmp_path, monkeypatch)
    try:
        yield one
    finally:
        one.close()


def test_workers_survive_a_killed_penstock_up_and_rejoin_the_next(elastic: Elastic) -> None:
    up = elastic.up("--min", "2", "--max", "2")
    elastic.has_workers(2)
    before = elastic.processes()
    endpoint = elastic.pool.endpoint
    batches = iter(elastic.loader(400))
    given = [next(batches).tolist() for _ in range(5)]
    up.end(signal.SIGKILL)
    given += [next(batches).tolist() for _ in range(5)]
    elastic.up("--min", "2", "--max", "2")
    assert elastic.pool.endpoint == endpoint
    given += [batch.tolist() for batch in batches]
    assert given == expected(400)
    elastic.has_workers(2)
    assert elastic.processes() == before


def test_down_ends_a_killed_pool_once_up_is_restarted(
    elastic: Elastic,
) -> None:
    """All of it is gone, except the files that an operator may want to read."""
    elastic.up("--min", "2", "--max", "2").end(signal.SIGKILL)
    down = elastic.down("--timeout", "1")
    assert down.wait() == 1
    assert "start `penstock up` again with the same --state" in down.output
    up = elastic.up("--min", "2", "--max", "2")
    elastic.has_workers(2)
    down = elastic.down()
    assert down.wait() == 0, down.output
    assert up.wait() == 0, up.output
    assert elastic.processes() == {}
    assert {path.name for path in elastic.state.iterdir()} == {"journal", "logs", "lock"}
    assert [*Path(elastic.pool.environment["TMPDIR"]).iterdir()] == []


@pytest.mark.long
def test_workers_of_a_killed_penstock_up_exit_without_a_restart(
    elastic: Elastic,
) -> None:
    up = elastic.up("--min", "2", "--max", "2")
    elastic.has_workers(2)
    up.end(signal.SIGKILL)
    elastic.runs_processes(lambda names: not names)
    assert [*Path(elastic.pool.environment["TMPDIR"]).iterdir()] == []


def test_second_penstock_up_on_one_state_folder_is_rejected(elastic: Elastic) -> None:
    elastic.up()
    second = Process(
        ["up", "--engine", "local", "--state", str(elastic.state)], elastic.pool.environment
    )
    assert second.wait() == 1
    assert (
        f"another penstock up is using {elastic.state}; stop it with penstock down" in second.output
    )


def test_state_and_logs_are_private_to_their_user(elastic: Elastic) -> None:
    """Every user of the machine could read the output of datasets."""
    elastic.up("--min", "1", "--max", "1")
    (name,) = elastic.runs_processes(lambda names: len(names) == 1)
    modes = {
        path: stat.S_IMODE((elastic.state / path).stat().st_mode)
        for path in (".", "logs", "journal", f"logs/{name}.log")
    }
    assert modes == {".": 0o700, "logs": 0o700, "journal": 0o600, f"logs/{name}.log": 0o600}


def test_workers_get_only_their_own_secret_key(elastic: Elastic) -> None:
    """Workers, and so all datasets, could read the operator's folder, with all secrets of the
    pool."""
    keys = elastic.state.parent / "keys"
    assert Process(["keys", str(keys)], elastic.pool.environment).wait() == 0
    elastic.pool.environment["PENSTOCK_KEYS"] = str(keys)  # is the default of --keys
    up = elastic.up("--min", "1", "--max", "1")
    elastic.runs_processes(lambda names: len(names) == 1)
    (pid,) = elastic.processes().values()
    arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    folder = Path(arguments[arguments.index("--keys") + 1])
    assert folder == elastic.state / "worker-keys"
    public = {f"{role}.public" for role in ("controller", "operator", "trainer", "worker")}
    assert {path.name for path in folder.iterdir()} == public | {"worker.secret"}
    assert str(keys) not in Path(f"/proc/{pid}/environ").read_text()
    assert [batch.tolist() for batch in elastic.loader(40, keys=str(keys))] == expected(40)
    down = elastic.down()
    assert down.wait() == 0, down.output
    assert up.wait() == 0, up.output
    assert not folder.exists()


@pytest.mark.long
def test_spent_budget_starts_no_worker_and_is_reported(elastic: Elastic) -> None:
    elastic.up("--max", "3", "--price", "1", "--budget", "0")
    loader = elastic.loader(8, timeout=3)
    with pytest.raises(RuntimeError, match="timed out after 3 seconds"):
        next(iter(loader))
    assert elastic.processes() == {}
    assert "budget" in elastic.pool.status()["engine"]["reason"]


def test_invalid_arguments_are_rejected(elastic: Elastic) -> None:
    for arguments, words in [
        (["--min", "5", "--max", "2"], "--min must be <= --max (2), got 5"),
        (["--budget", "3"], "--budget requires --price"),
        (["--price", "cheap"], "--price must be an amount >= 0, got 'cheap'"),
        (["--worker-keys", "folder"], "--worker-keys requires --keys"),
        (["--env", "NO_SUCH_NAME"], "must name a variable of the environment, got 'NO_SUCH_NAME'"),
    ]:
        process = Process(["up", "--engine", "local", *arguments], elastic.pool.environment)
        assert process.wait() == 2
        assert words in process.output


def test_penstock_down_rejects_a_pool_without_an_engine(elastic: Elastic) -> None:
    elastic.pool.start_controller()
    down = elastic.down()
    assert down.wait() == 1
    assert "has no engine" in down.output


def kill_the_worker(elastic: Elastic) -> None:
    (pid,) = elastic.processes().values()
    kill_family(pid)


def wait_for_the_journal_error(elastic: Elastic, up: Process, why: str) -> None:
    """`penstock up` reports in its log and in the status why it starts no workers."""
    (line,) = up.wait_for_lines(
        lambda line: "no workers are started, and running workers continue" in line
    )
    assert f"because the journal cannot be written ({why})" in line

    def is_reported(status: dict[str, Any]) -> bool:
        refusal = (status["engine"] or {}).get("refusal") or ""
        return refusal.startswith(f"the journal cannot be written ({why})")

    elastic.status_when(is_reported)


@pytest.mark.long("SIGINT", "down")
@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "down"])
def test_pool_on_a_full_disk_starts_no_worker_and_shuts_down(elastic: Elastic, how: str) -> None:
    """It survived without its adapter, ignored signals, and its workers were left behind."""
    up = elastic.up("--min", "1", "--max", "1")
    elastic.has_workers(1)
    with full_disk(up):
        kill_the_worker(elastic)
        wait_for_the_journal_error(elastic, up, "File too large")
        assert elastic.processes() == {}
    up.wait_for_lines(lambda line: "workers are started as needed" in line)
    elastic.has_workers(1)
    with full_disk(up):
        if how == "down":
            down = elastic.down()
            assert down.wait() == 0, down.output
        else:
            up.process.send_signal(signal.Signals[how])
        assert up.wait() == 0, up.output
    assert elastic.processes() == {}


def test_pool_started_on_a_full_disk_tracks_existing_workers(elastic: Elastic) -> None:
    up = elastic.up("--min", "1", "--max", "1")
    elastic.has_workers(1)
    before = elastic.processes()
    up.end(signal.SIGKILL)
    up = elastic.up("--min", "1", "--max", "1", within=ON_A_FULL_DISK)
    wait_for_the_journal_error(elastic, up, "File too large")
    elastic.has_workers(1)
    assert elastic.processes() == before
    free_disk(up)
    up.wait_for_lines(lambda line: "workers are started as needed" in line)
    assert up.end() == 0, up.output
    assert elastic.processes() == {}


@pytest.mark.long
def test_pool_on_a_full_file_system_continues_and_shuts_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").mkdir()
    try:
        tiny = tiny_folder(str(tmp_path / "state"))
    except NotHere as reason:
        pytest.skip(str(reason))
    elastic = Elastic(tmp_path, monkeypatch, within=tiny.within)
    try:
        up = elastic.up("--min", "1", "--max", "1")
        elastic.has_workers(1)
        ((name, worker),) = elastic.processes().items()
        up.end(signal.SIGKILL)
        tiny.fill(worker)
        there = ("nsenter", f"--target={worker}", "--mount", "--wd", "--")
        up = elastic.up("--min", "1", "--max", "1", within=there)
        wait_for_the_journal_error(elastic, up, "No space left on device")
        elastic.has_workers(1)
        assert elastic.processes() == {name: worker}
        kill_the_worker(elastic)
        tiny.empty(up.process.pid)
        elastic.runs_processes(lambda names: len(names) == 1 and name not in names)
        tiny.fill(up.process.pid)
        assert up.end() == 0, up.output
        assert elastic.processes() == {}
    finally:
        elastic.close()


def test_controller_that_cannot_listen_leaves_no_worker(elastic: Elastic) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        up = Process(
            ["up", "--engine", "local", "--state", str(elastic.state), "--min", "1"]
            + ["--bind", bind],
            elastic.pool.environment,
        )
        elastic.pool.processes.append(up)
        assert up.wait() == 1
    assert up.output.startswith(f"penstock up: listening at {bind} failed: Address already in use")
    assert elastic.processes() == {}


def test_restarted_controller_uses_another_port_if_taken(elastic: Elastic) -> None:
    up = elastic.up("--min", "1", "--max", "1")
    elastic.has_workers(1)
    before = elastic.pool.endpoint
    up.end(signal.SIGKILL)
    with socket.create_server(("127.0.0.1", int(before.rpartition(":")[2]))):
        up = elastic.up("--min", "1", "--max", "1")
        assert elastic.pool.endpoint != before
        assert f"listening at {before} failed: Address already in use" in up.output
        assert up.end() == 0, up.output
    assert elastic.processes() == {}


def stop_pipe(pid: int) -> Path:
    """Through which the controller of `penstock up` is ordered to end."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if int(fd.name) > 2 and os.readlink(fd).startswith("pipe:"):
                return fd
    raise AssertionError(f"process {pid} has no pipe")


@pytest.mark.skipif(os.geteuid() != 0, reason="what a controller has open is shown to root alone")
def test_penstock_up_exits_when_its_controller_ends(elastic: Elastic) -> None:
    """It kept running, and could not be given orders."""
    up = elastic.up()
    with open(stop_pipe(up.process.pid), "wb", buffering=0) as pipe:
        pipe.write(b"x")
    assert up.wait() == 1
    assert "penstock up: the controller has ended: it was stopped;" in up.output
