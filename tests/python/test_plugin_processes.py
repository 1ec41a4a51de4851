# SPDX-License-Identifier: Apache-2.0
"""The processes of `penstock-worker`: its server, the warm process, which has loaded libtorch, and
one for each job, in which a plug-in runs. The counterpart of test_job_processes.py, which tests
Python's."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import process_traces
import pytest
from cpp_loader import PLUGIN, error_of_cpp, finish_cpp, run_cpp, start_cpp
from native_build import native_folder
from pool_processes import SECONDS_MAX, PoolProcesses, Worker, pool_of
from raw_zeromq import key_bytes
from test_job_processes import (
    ENDS,
    SERVER_PRIVATE_MIB_MAX,
    ends_by,
    expect_same_server,
    found_in_memory,
    kill_the_server,
    kill_the_supervisor,
    kill_the_warm_process,
    libraries_of,
    private_mib,
    process_in,
    says,
    server_of,
    tcp_sockets,
    terminate_the_supervisor,
    wait_until,
    warm_of,
)

from penstock import _pool

pytestmark = pytest.mark.slow

SIX_SAMPLES: dict[str, Any] = {"size": 6, "options": {"batch_size": 2}, "seed": 3}


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def of_plugin(pool: PoolProcesses, dataset: str, **arguments: Any) -> dict[str, Any]:
    named = {"plugin": str(PLUGIN), "dataset": dataset, "arguments": arguments}
    return {**SIX_SAMPLES, **named, "pool": pool.endpoint}


def expect_served(pool: PoolProcesses) -> None:
    batches = run_cpp(**of_plugin(pool, "counting", size=6))
    assert [count for batch in batches for count in batch[0]] == list(range(6))


# ---- A job leaves no trace for the next one


def test_plugin_changes_do_not_reach_other_jobs(
    pool: PoolProcesses,
) -> None:
    """All jobs of a worker had one process, with its settings, threads and static objects."""
    worker = pool.start_native_worker()
    server = server_of(worker)
    pids = set()
    for _ in range(2):
        ((pid, *found),) = run_cpp(**of_plugin(pool, "spoiling_sample"))
        made_count, has_variable, is_double, mask = (part[0] for part in found)
        assert (made_count, has_variable, is_double) == (0, 0, 0)
        assert mask != 0o007
        pids.add(pid[0])
    assert len(pids) == 2
    expect_same_server(worker, server)


# ---- A job's process that ends


def test_plugin_exit_fails_only_its_own_job(pool: PoolProcesses) -> None:
    """It ended the worker: with the exit codes 0 and 78 for good, and its last words were only in
    the worker's log."""
    worker = pool.start_native_worker()
    server = server_of(worker)
    for how, cause in ENDS.items():
        said = error_of_cpp(**of_plugin(pool, "ending_sample", how=how))
        assert "died" in said and "batch 3 of epoch 1" in said
        assert cause in said
        assert f"its last output: about to end: {how}" in said
        expect_same_server(worker, server)
        worker.wait_for_lines(ends_by(cause))
        assert worker.wait_for_lines(says(f"about to end: {how}"), 3)
    expect_served(pool)
    expect_same_server(worker, server)
    assert worker.end() == 0


# ---- Resources of each process


def test_server_has_no_torch_and_warm_process_one_thread(pool: PoolProcesses) -> None:
    worker = pool.start_native_worker()
    expect_served(pool)
    server, warm = server_of(worker), warm_of(worker)
    assert "libtorch" not in libraries_of(server) and "libtorch" in libraries_of(warm)
    assert private_mib(server) < SERVER_PRIVATE_MIB_MAX
    assert len(os.listdir(f"/proc/{warm}/task")) == 1
    assert "must have one thread" not in worker.output


def test_plugin_cannot_read_worker_keys(pool: PoolProcesses, tmp_path: Path) -> None:
    """It read `worker.secret`, and could pose as a worker elsewhere."""
    keys = tmp_path / "keys"
    _pool.make_key_folder(str(keys))
    pool.start_controller("--keys", str(keys))
    worker = pool.start_native_worker("--keys", str(keys))
    if "jobs are not kept from the keys" in worker.output:
        pytest.skip("this system has neither mount namespaces nor Landlock for the worker")
    other = tmp_path / "other"
    other.write_text("not a key")
    found = []
    for file in (keys / "worker.secret", other):
        of = of_plugin(pool, "reading_sample", file=str(file))
        found.append(run_cpp(**of, environment={"PENSTOCK_KEYS": str(keys)}))
    assert [list(batch) for batch in found[0]] == [[0, 0]] * 3
    assert [list(batch) for batch in found[1]] == [[1, 1]] * 3
    assert worker.end() == 0


def test_key_folder_containing_a_loaded_library_is_not_hidden(
    pool: PoolProcesses, tmp_path: Path
) -> None:
    """Libraries that a job loads later from the folder would be gone."""
    keys = tmp_path / "keys"
    _pool.make_key_folder(str(keys))
    pool.start_controller("--keys", str(keys))
    (keys / "lib").mkdir()
    mapped = Path("/proc/self/maps").read_text().split()
    library = shutil.copy(next(path for path in mapped if "/libm.so" in path), keys / "lib")
    pool.environment["LD_PRELOAD"] = str(library)
    worker = pool.start_native_worker("--keys", str(keys))
    said = f"not kept from the keys: the key folder {keys} contains {library}"
    worker.wait_for_lines(lambda line: said in line)


def test_plugin_process_has_no_keys_or_pool_sockets(pool: PoolProcesses, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    _pool.make_key_folder(str(keys))
    pool.start_controller("--keys", str(keys))
    worker = pool.start_native_worker("--keys", str(keys))
    of = of_plugin(pool, "blocking_sample", folder=str(tmp_path))
    program = start_cpp(**of, environment={"PENSTOCK_KEYS": str(keys)})
    job = process_in(tmp_path)
    warm = warm_of(worker)
    assert process_traces.children(warm) == [job]
    secrets = {
        path.name: [path.read_bytes().strip(), key_bytes(keys, path.name)]
        for path in keys.glob("*.secret")
    }
    assert len(secrets) > 1
    sockets = tcp_sockets()
    for pid in (job, warm):
        links = [entry.partition(" -> ")[2] for entry in process_traces.descriptors(pid)]
        assert any(link.startswith("socket:") for link in links)  # to the server
        assert sockets.isdisjoint(links)
        for file in ("environ", "cmdline"):
            text = Path(f"/proc/{pid}/{file}").read_bytes()
            assert not [name for name, (secret, _) in secrets.items() if secret in text]
        assert found_in_memory(pid, secrets) == set()
    (tmp_path / "go").touch()
    code, out, err = finish_cpp(program)
    assert code == 0, err
    assert [json.loads(line) for line in out.splitlines()] == [[0, 1], [2, 3], [4, 5]]


# ---- When they end


@pytest.mark.parametrize(
    "end",
    [
        terminate_the_supervisor,
        kill_the_supervisor,
        kill_the_server,
        kill_the_warm_process,
    ],
)
def test_all_processes_end_with_their_worker(
    pool: PoolProcesses, tmp_path: Path, end: Callable[[Worker, int, int], None]
) -> None:
    worker = pool.start_native_worker("--grace", "1")
    program = start_cpp(**of_plugin(pool, "blocking_sample", folder=str(tmp_path)))
    job = process_in(tmp_path)
    server, warm = server_of(worker), warm_of(worker)
    end(worker, server, warm)
    assert process_traces.wait_gone([server, warm, job], SECONDS_MAX) == []
    (tmp_path / "go").touch()
    if end in (kill_the_server, kill_the_warm_process):
        assert len(worker.served(2)) == 2
    else:
        pool.start_native_worker()
    code, out, err = finish_cpp(program)
    assert code == 0, err
    assert [json.loads(line) for line in out.splitlines()] == [[0, 1], [2, 3], [4, 5]]


def test_job_process_ends_when_its_trainer_leaves(pool: PoolProcesses) -> None:
    worker = pool.start_native_worker()
    expect_served(pool)
    warm = warm_of(worker)
    wait_until(lambda: process_traces.children(warm) == [])


def test_missing_server_program_error_advises_reinstalling(
    pool: PoolProcesses, tmp_path: Path
) -> None:
    for library in native_folder().glob("libpenstock*"):
        (tmp_path / library.name).write_bytes(library.read_bytes())
    worker = Worker(
        ["--controller", pool.endpoint],
        {**pool.environment, "LD_LIBRARY_PATH": str(tmp_path)},
        program=(str(native_folder() / "penstock-worker"),),
    )
    assert worker.wait() == 1
    assert (
        "is not in the folder of libpenstock.so or cannot be run; reinstall penstock"
        in worker.output
    )
