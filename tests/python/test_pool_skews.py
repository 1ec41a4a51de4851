# SPDX-License-Identifier: Apache-2.0
"""Version mismatches, badly configured hosts, missing controllers: the user gets an explanation, in
the place where they look."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from pickle import PicklingError
from typing import Any

import pytest
import torch
from pool_datasets import CODE, Augmented
from pool_processes import SECONDS_MAX, PoolProcesses, Worker, pool_of
from raw_zeromq import (
    CONTROL_VERSION,
    DEALER,
    REFUSAL,
    ROUTER,
    RawSocket,
    farewell_of_worker,
    hello,
    run_id,
    welcome,
    worker_report,
)

import penstock
from penstock import DataLoader, Pool, _pool
from penstock.errors import PenstockError, PoolWarning
from penstock.pool.pool_status import PoolStatus, status_text

pytestmark = pytest.mark.slow

ABSENT = "tcp://127.0.0.1:9"  # without a listener


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcesses]:
    """A controller. Each test starts its workers."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield from pool_of(tmp_path_factory.mktemp("skewed"), monkeypatch)


@contextlib.contextmanager
def serving(worker: Worker) -> Iterator[Worker]:
    """No other test uses it in its pool."""
    try:
        yield worker
    finally:
        worker.end()


def pooled(pool: PoolProcesses, dataset: Any, **options: Any) -> DataLoader[Any]:
    code_paths = options.pop("code_paths", [CODE])
    options = {"timeout": 60, **options}
    return DataLoader(dataset, pool=Pool(pool.endpoint, code_paths=code_paths), **options)


def shared_keys() -> Path:
    return Path(_pool.shared_key_folder())


# ---- Versions


@pytest.mark.long
def test_penstock_version_mismatch_names_both_versions(pool: PoolProcesses) -> None:
    both = f"penstock {re.escape(penstock.__version__)}, but this worker .* has penstock 9.9.9"
    with (
        serving(pool.start_altered_worker("say_another_version", "9.9.9")),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", PoolWarning)
        with pytest.raises(PenstockError, match=f"no worker of the pool can run this job.*{both}"):
            next(iter(pooled(pool, Augmented(4))))
    assert any(re.search(both, str(one.message)) for one in caught)


@pytest.mark.long
def test_worker_rejects_trainer_of_other_protocol_version(pool: PoolProcesses) -> None:
    with serving(pool.start_worker()) as worker, RawSocket(DEALER) as trainer:
        trainer.use_key(shared_keys(), "trainer", "worker")
        trainer.connect(worker.served()[0][1])
        trainer.send(hello(trainer_id=7, version=2))
        head = trainer.receive()[0]
        assert (head[:4], head[6]) == (b"PNT1", 9)  # declined
        assert re.search(b"version 2, but this process uses version [0-9]+;", head)
        assert b"run the same version of penstock on both sides" in head


@pytest.mark.long
def test_trainer_warns_about_worker_of_other_protocol_version(pool: PoolProcesses) -> None:
    with RawSocket(ROUTER) as worker, RawSocket(DEALER) as registration:
        worker.serve_as(shared_keys(), "worker")
        endpoint = worker.bind()
        registration.use_key(shared_keys(), "worker", "controller")
        registration.connect(pool.endpoint)
        worker_id = run_id(shared_keys(), "worker")
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                registration.send(worker_report(worker_id, endpoint))
                with contextlib.suppress(BlockingIOError):
                    routing_id, *_ = worker.receive()
                    worker.send(routing_id, welcome(worker_id, version=2))

        for one in (worker, registration):
            one.set_timeout(0.25)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.warns(
                PoolWarning,
                match="cannot be used.*version 2, but this process uses version [0-9]+;",
            ):
                with pytest.raises(RuntimeError, match="timed out after 4 seconds"):
                    next(iter(pooled(pool, Augmented(4), timeout=4)))
        finally:
            stop.set()
            thread.join()
        registration.send(farewell_of_worker(worker_id))


def test_controller_rejects_other_protocol_version(pool: PoolProcesses) -> None:
    with RawSocket(DEALER) as worker:
        worker.use_key(shared_keys(), "worker", "controller")
        worker.connect(pool.endpoint)
        worker.send(worker_report(7, "tcp://127.0.0.1:9", version=1))
        (answer,) = worker.receive()
    assert answer[6] == REFUSAL
    assert f"version 1, but this process uses version {CONTROL_VERSION}".encode() in answer


# ---- Resources that workers lack


def test_unpicklable_dataset_error_names_the_attribute(
    pool: PoolProcesses,
) -> None:
    dataset = Augmented(4)
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(PicklingError, match=r"(?s)dataset\.lock.*_thread\.lock.*__getstate__"):
        iter(pooled(pool, dataset))


@pytest.mark.long
def test_missing_module_is_named_by_all_workers(pool: PoolProcesses) -> None:
    words = (
        "(?s)no worker of the pool can run.*'pool_datasets'.*pass pool=.*code_paths=.*install it"
    )
    with serving(pool.start_worker(processes=2)):
        while len(pool.status()["workers"]) < 2:
            time.sleep(0.05)  # the first to connect would be all of the pool
        with pytest.warns(PoolWarning, match="does not work for this trainer.*'pool_datasets'"):
            with pytest.raises(PenstockError, match=words) as raised:
                next(iter(pooled(pool, Augmented(4), code_paths=None)))
        assert "all of its 2 have rejected this job" in str(raised.value)
        assert str(raised.value).count("needs the module 'pool_datasets'") == 2
        # A corrected job is served by the workers that declined the one before.
        assert len(list(pooled(pool, Augmented(4)))) == 4


@contextlib.contextmanager
def consuming(batches: Iterator[Any]) -> Iterator[None]:
    """A trainer that wants no batch for a while has no worker either."""
    stop = threading.Event()

    def consume() -> None:
        while not stop.wait(0.01):
            next(batches)

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.long
def test_job_gets_the_workers_that_can_run_it(pool: PoolProcesses) -> None:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), CODE]))

    def wait_for_trainer(worker: Worker) -> tuple[str, list[str]]:
        """The trainer that it is assigned to, and the trainers that it cannot work for."""
        ((worker_id, _, _),) = worker.served()
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            assert time.monotonic() < deadline
            for found in pool.status()["workers"]:
                if found["id"] == worker_id and found["assigned_to"] and not found["is_withdrawn"]:
                    return found["assigned_to"], found["unfit_for"]
            time.sleep(0.05)

    # The jobs can use more workers than there are.
    with (
        serving(pool.start_worker(environment={"PYTHONPATH": path})) as able,
        consuming(iter(pooled(pool, Augmented(100_000, seconds=0.05)))),
    ):
        easy, _ = wait_for_trainer(able)
        with serving(pool.start_worker()) as unable:
            assert wait_for_trainer(unable) == (easy, [])
            # The worker that connected last is assigned to the newest trainer, which cannot use it.
            batches = iter(pooled(pool, Augmented(100_000, seconds=0.05), code_paths=None))
            with pytest.warns(PoolWarning, match="does not work for this trainer"):
                found = [next(batches)["index"].item() for _ in range(40)]
            assert found == list(range(40))
            with consuming(batches):
                picky, _ = wait_for_trainer(able)
                assert picky != easy
                assert wait_for_trainer(unable) == (easy, [picky])
            # Without the one that can, the trainer waits: its parent is about to start it again.
            place = next(batches)["index"].item() + 1
            os.kill(able.pids[0], signal.SIGKILL)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PoolWarning)
                found = [next(batches)["index"].item() for _ in range(40)]
            assert found == list(range(place, place + 40))


class Large(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, mebibytes: int) -> None:
        self.values = torch.zeros(mebibytes << 20, dtype=torch.uint8)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index]


@pytest.mark.long
def test_worker_without_memory_for_dataset_rejects_the_job(pool: PoolProcesses) -> None:
    with serving(pool.start_altered_worker("have_little_memory", "200")):
        with pytest.raises(
            PenstockError, match=r"memory for (the \d+ bytes|a part of the job|its dataset)"
        ):
            next(iter(pooled(pool, Large(300), timeout=20)))
        assert len(list(pooled(pool, Augmented(4)))) == 4


# ---- Controllers


@pytest.mark.long
def test_worker_reports_missing_controller(pool: PoolProcesses) -> None:
    elsewhere = PoolProcesses(pool.folder)
    elsewhere.endpoint = ABSENT
    try:
        worker = elsewhere.start_worker()
        (said,) = worker.wait_for_lines(lambda line: "no controller answers" in line)
        assert f"start one there (penstock controller --bind {ABSENT})" in said
        assert worker.end() == 0
    finally:
        elsewhere.close()


@pytest.mark.long
def test_worker_reports_lost_controller_and_exits(pool: PoolProcesses) -> None:
    other = PoolProcesses(pool.folder)
    try:
        controller = other.start_controller()
        worker = other.start_worker("--patience", "1")
        batches = iter(pooled(other, Augmented(4)))
        next(batches)
        controller.end()
        assert len(list(batches)) == 3
        del batches
        worker.wait_for_lines(
            lambda line: "does not answer any more; this worker continues" in line
        )
        assert worker.wait() == 1
        assert "has not answered for" in worker.output
        assert "restart it when a controller is running" in worker.output
    finally:
        other.close()


def test_status_distinguishes_jobs_of_one_name(pool: PoolProcesses) -> None:
    streams = [iter(pooled(pool, Augmented(4))) for _ in range(2)]  # no worker serves them
    deadline = time.monotonic() + SECONDS_MAX
    trainers: list[Any] = []
    while len(trainers) < 2:
        assert time.monotonic() < deadline
        everybody = pool.status()["trainers"]
        trainers = [one for one in everybody if one["job"].endswith(": Augmented")]
    assert len({trainer["job"] for trainer in trainers}) == 1
    lines = status_text(PoolStatus(pool.status())).splitlines()
    for trainer in trainers:
        (row,) = (line for line in lines if trainer["id"][:8] in line.split())
        assert trainer["job"] in row and f"{socket.gethostname()}/{os.getpid()}" in row
    del streams
