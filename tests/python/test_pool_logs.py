# SPDX-License-Identifier: Apache-2.0
"""The logs of controllers and workers. There were no times, and a worker did not log which job it
served, rejected or had finished, nor that it was asked to leave."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_processes import SECONDS_MAX, PoolProcesses, Worker, pool_of
from torch.utils.data import TensorDataset

from penstock import DataLoader, _pool
from penstock.pool.pool_log import JobJournal, PoolLog, printable

HOST = re.escape(socket.gethostname())
LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} "
    rf"(penstock \w+(?: [0-9a-f]{{8}})?) on {HOST}: (.*)"
)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


class Match(str):
    """Equal to the texts that a pattern matches."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and re.fullmatch(str(self), other) is not None

    __hash__ = str.__hash__


def said(lines: list[str]) -> list[tuple[str, str]]:
    """Who logged which message; every line has when and where."""
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), lines
    return [(match[1], match[2]) for match in matches if match is not None]


def loader_of(pool: PoolProcesses, count: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(count)), batch_size=2, pool=pool.endpoint)


def job_line(worker: Worker, verb: str) -> str:
    return worker.wait_for_lines(lambda line: f": {verb} " in line)[0]


@pytest.mark.long
@pytest.mark.slow
def test_logs_record_jobs_and_worker_exit_reasons(
    pool: PoolProcesses,
) -> None:
    worker = pool.start_worker()
    ((worker_id, _, _),) = worker.served(1)
    loader = loader_of(pool, 6)
    assert len(list(loader)) == 3
    (trainer,) = pool.status()["trainers"]
    del loader
    job_line(worker, "has finished")
    assert worker.end(signal.SIGTERM) == 0
    name, job = f"penstock worker {worker_id[:8]}", f"{trainer['job']} of trainer"
    # There is a line about the limit of open files only if the test's limit is not its hard one.
    lines = [line for line in said(worker.lines) if "files open" not in line[1]]
    assert lines[0][0] == name and lines[0][1].startswith("listens at tcp://127.0.0.1:")
    assert lines[1:] == [
        (name, f"serves {job} {trainer['id'][:8]}"),
        (name, f"has finished {job} {trainer['id'][:8]}: 3 batches"),
        ("penstock worker", "draining 1 worker after SIGTERM; a second signal ends it immediately"),
        (name, "draining after SIGTERM; 0 batches left"),
        (name, "ends: this worker was drained"),
    ]
    controller = pool.processes[0]
    assert controller.end(signal.SIGINT) == 0
    lines = [line for line in said(controller.lines) if "files open" not in line[1]]
    assert {name for name, _ in lines} == {"penstock controller"}
    first, *members, last = (text for _, text in lines)
    assert first.startswith(f"listens at {pool.endpoint}, keys in ")
    assert last == "ends after SIGINT"
    worker_name, trainer_name = f"worker {worker_id[:8]}", f"trainer {trainer['id'][:8]}"
    host = socket.gethostname()
    assert [text for text in members if text.startswith(worker_name)] == [
        Match(rf"{worker_name} joined: {host}, process \d+, penstock .*"),
        Match(rf"{worker_name} left: it was drained"),
    ]
    assert [text for text in members if text.startswith(trainer_name)] == [
        Match(rf"{trainer_name} joined: {re.escape(trainer['job'])}; {host}, process \d+, .*"),
        Match(rf"{trainer_name} left: it ended, after 3 batches"),
    ]


@pytest.mark.long
@pytest.mark.slow
def test_controller_logs_a_worker_that_disappears(pool: PoolProcesses) -> None:
    worker = pool.start_worker()
    ((worker_id, _, server),) = worker.served(1)
    controller = pool.processes[0]
    controller.wait_for_lines(lambda line: f"worker {worker_id[:8]}" in line)
    os.kill(server, signal.SIGKILL)
    lost = controller.wait_for_lines(lambda line: " left: no report for 1500 ms" in line)
    assert f"worker {worker_id[:8]}" in lost[0]


@pytest.mark.slow
def test_idle_connections_do_not_exhaust_worker_descriptors(pool: PoolProcesses) -> None:
    """Under the usual soft limit of 1,024 open files, here 200, a worker could not even be reached,
    and its dataset could open none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        worker = pool.start_worker()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ((_, endpoint, _),) = worker.served(1)
    limit = min(hard, 1 << 20)
    worker.wait_for_lines(
        lambda line: f"can have {limit} files open; the previous limit was 200" in line
    )
    host, port = endpoint.removeprefix("tcp://").split(":")
    with contextlib.ExitStack() as strangers:
        for _ in range(300):
            stranger = strangers.enter_context(socket.create_connection((host, int(port))))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(b"\xff")  # the worker learns of it only now
        assert len(list(loader_of(pool, 6))) == 3


@pytest.mark.slow
def test_worker_logs_rejected_trainer_and_operator_drain(
    pool: PoolProcesses,
) -> None:
    worker = pool.start_worker(environment={"PENSTOCK_JOB_BYTES": "100"})
    ((worker_id, _, _),) = worker.served(1)
    with pytest.raises(Exception, match="PENSTOCK_JOB_BYTES"), pytest.warns(match="JOB_BYTES"):
        list(loader_of(pool, 1000))
    refusal = LINE.fullmatch(job_line(worker, "refuses"))
    assert refusal is not None
    assert re.match("refuses trainer [0-9a-f]{8}: .*PENSTOCK_JOB_BYTES", refusal[2])
    assert _pool.drain_worker(pool.endpoint, None, int(worker_id, 16), SECONDS_MAX)
    assert worker.wait() == 0
    assert said(worker.lines)[-2:] == [
        (f"penstock worker {worker_id[:8]}", "draining after penstock drain; 0 batches left"),
        (f"penstock worker {worker_id[:8]}", "ends: this worker was drained"),
    ]


def test_journal_writes_lines_for_changes_only() -> None:
    lines: list[str] = []
    journal = JobJournal(lines.append)
    for trainer_id, job in [(1, "a"), (1, "a"), (1, "b"), (2, "b"), (2, "b")]:
        journal.note_batch(trainer_id, job)
    journal.note_refusal(2, "it has another penstock")
    journal.note_batch(2, "a")
    journal.finish()
    journal.finish()
    assert lines == [
        "serves a of trainer 00000000",
        "has finished a of trainer 00000000: 2 batches",
        "serves b of trainer 00000000",
        "has finished b of trainer 00000000: 1 batch",
        "serves b of trainer 00000000",
        "has finished b of trainer 00000000: 2 batches",
        "refuses trainer 00000000: it has another penstock",
        "serves a of trainer 00000000",
        "has finished a of trainer 00000000: 1 batch",
    ]


def test_job_name_cannot_forge_log_lines(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Anyone with a trainer's key chooses it."""
    log = PoolLog("penstock worker 3f2a")
    JobJournal(log.info).note_batch(7, "x\x1b[2J\n2026-11-23T14:05:01+0000 penstock worker 3f2a")
    first, second = capfd.readouterr().out.splitlines()
    assert LINE.fullmatch(first.replace("3f2a", "3f2a3f2a")) and "x\\x1b[2J" in first
    assert second.startswith("    ")
    assert printable("Bücher.py: 学习\t") == "Bücher.py: 学习\\t"
    JobJournal(log.info).note_batch(7, "y" * 100_000)
    assert len(capfd.readouterr().out) < 400


def test_unwritable_log_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose log filled its disk would leave at the next line."""
    full = open("/dev/full", "w")  # noqa: SIM115 - its end fails as well
    monkeypatch.setattr(sys, "stdout", full)
    JobJournal(PoolLog("penstock worker").info).note_batch(7, "train.py")
    with contextlib.suppress(OSError):
        full.close()
