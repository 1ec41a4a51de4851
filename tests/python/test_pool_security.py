# SPDX-License-Identifier: Apache-2.0
"""A live pool with keys of ``penstock keys`` under attack: who is rejected, what its processes
expose about themselves, and that a good client is served all the while. csrc/net/SECURITY.md has
the table of it."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import BENCH
from pool_datasets import CODE, Augmented, digests
from pool_processes import SECONDS_MAX, PoolProcesses, Process, Worker
from raw_zeromq import (
    DEALER,
    REFUSAL,
    STATUS_REQUEST,
    RawSocket,
    drain_request,
    farewell_of_trainer,
    hello,
    run_id,
    trainer_report,
    worker_report,
)

from penstock import DataLoader, Pool, _pool
from penstock.cli.command_line import main
from penstock.errors import PenstockError
from penstock.pool.pool_status import PoolStatus, status_text

pytestmark = pytest.mark.slow

ROLES = ("controller", "trainer", "worker", "operator")
# It takes a fraction of a second; a busy machine is not the pool's fault.
SERVED_SECONDS_MAX = 10.0
CLOSED_SECONDS_MAX = 40.0  # the handshake has 5 s
GROWTH_MAX = 128 << 20  # of a process that was attacked


class KeyedPool(PoolProcesses):
    """A controller, a worker, and the key folders of their hosts and of others."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.keys = folder / "keys"
        made = Process(["keys", str(self.keys)], self.environment)
        assert made.wait() == 0, made.output
        self.hosts = {role: self.host(role) for role in ROLES}
        self.controller = self.start_controller("--keys", str(self.hosts["controller"]))
        self.worker = self.start_worker("--keys", str(self.hosts["worker"]))
        _, self.worker_endpoint, self.worker_pid = self.worker.served()[0]

    def host(self, role: str) -> Path:
        """A folder with the secret of one role and all public keys, as on each host."""
        folder = self.folder / f"{role}-host"
        shutil.copytree(self.keys, folder)
        for other in set(ROLES) - {role}:
            (folder / f"{other}.secret").unlink()
        return folder

    @property
    def servers(self) -> list[tuple[str, int]]:
        """Endpoint and pid of each process that listens."""
        return [
            (self.endpoint, self.controller.process.pid),
            (self.worker_endpoint, self.worker_pid),
        ]

    @property
    def ports(self) -> list[tuple[str, int]]:
        """All addresses that anyone can connect to."""
        return [*self.servers, (self.worker.data_endpoint(), self.worker_pid)]

    def status(self) -> dict[str, Any]:
        keys = str(self.hosts["operator"])
        found: dict[str, Any] = json.loads(
            _pool.pool_status(self.endpoint, keys, SERVED_SECONDS_MAX)
        )
        return found

    def loader(self, keys: Path | None, **options: Any) -> DataLoader[Any]:
        dataset = Augmented(8)
        options = {"batch_size": 4, "timeout": 30, **options}
        pool = Pool(self.endpoint, keys=keys, code_paths=[CODE])
        return DataLoader(dataset, pool=pool, **options)

    def expect_served(self) -> None:
        """Assert that a trainer and an operator with the right keys get the answers that they ask
        for."""
        begun = time.monotonic()
        assert [len(batch["index"]) for batch in self.loader(self.hosts["trainer"])] == [4, 4]
        assert [worker["endpoint"] for worker in self.status()["workers"]] == [self.worker_endpoint]
        assert time.monotonic() - begun < SERVED_SECONDS_MAX

    def start_wrong_worker(self, *arguments: str) -> Worker:
        """A process that is expected to end by itself."""
        worker = Worker(["worker", "--controller", self.endpoint, *arguments], self.environment)
        self.processes.append(worker)
        return worker


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedPool]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp("keyed")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
        for name in ("PENSTOCK_POOL", "PENSTOCK_KEYS"):
            monkeypatch.delenv(name, raising=False)
        opened = KeyedPool(folder)
        try:
            yield opened
        finally:
            opened.close()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """A command in this process; returns its exit code and its output."""
    said = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main()
    return code, said.getvalue()


def memory(pid: int) -> dict[str, int]:
    """Resident and virtual bytes, current and peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = [line.split(":") for line in lines if line.startswith("Vm")]
    return {name: int(value.split()[0]) << 10 for name, value in pairs}


def connected(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=CLOSED_SECONDS_MAX)


def wait_closed(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass


# ---- Keys that do not fit


@pytest.mark.long
def test_unknown_keys_are_rejected(pool: KeyedPool, tmp_path: Path) -> None:
    others = tmp_path / "others"
    _pool.make_key_folder(str(others))
    shutil.copy(pool.keys / "controller.public", others)
    (others / "controller.secret").unlink()
    words = "the server does not accept this key"
    worker = pool.start_wrong_worker("--keys", str(others))
    with pytest.raises(PenstockError, match=f"{words}.*penstock keys"):
        next(iter(pool.loader(others)))
    with pytest.raises(PenstockError, match=f"{words}.*penstock keys"):
        _pool.pool_status(pool.endpoint, str(others), SERVED_SECONDS_MAX)
    pool.expect_served()
    assert worker.wait() == 1
    assert words in worker.output and "penstock keys" in worker.output


@pytest.mark.long
def test_user_keys_allow_only_training_within_quota(tmp_path: Path) -> None:
    pool = PoolProcesses(tmp_path)
    keys, anns = tmp_path / "keys", tmp_path / "of ann"
    try:
        for arguments in (["keys", str(keys)], ["keys", str(keys), "--user", "ann"]):
            made = Process(
                [*arguments, *(["--out", str(anns)] if "--user" in arguments else [])],
                pool.environment,
            )
            assert made.wait() == 0, made.output
        terms = tmp_path / "terms.json"
        terms.write_text('{"users": {"ann": {"quota": 1}}}')
        pool.start_controller("--keys", str(keys), "--terms", str(terms))
        pool.start_worker("--keys", str(keys), processes=2)
        options: dict[str, Any] = {"batch_size": 4, "timeout": 30}
        loader = DataLoader(
            Augmented(400), pool=Pool(pool.endpoint, keys=str(anns), code_paths=[CODE]), **options
        )
        batches = iter(loader)
        next(batches)
        status = json.loads(_pool.pool_status(pool.endpoint, str(keys), SERVED_SECONDS_MAX))
        assert [(one["user"], one["workers"]) for one in status["trainers"]] == [("ann", 1)]
        for role in ("operator", "worker"):
            assert not (anns / f"{role}.secret").exists()
        assert 1 + sum(1 for _ in batches) == 100
    finally:
        pool.close()


def test_worker_warns_once_about_other_secrets_in_its_folder(pool: KeyedPool) -> None:
    """A dataset read them in the folder that its worker was given, and acted as the operator."""
    words = "controller.secret, trainer.secret, operator.secret in addition to worker.secret"
    nobody = "tcp://127.0.0.1:9"
    arguments = ["worker", "--controller", nobody, "--processes", "2", "--keys", str(pool.keys)]
    worker = Worker(arguments, pool.environment)
    pool.processes.append(worker)
    worker.served(2)
    worker.end()
    assert sum(words in line for line in worker.lines) == 1, worker.output
    assert "in addition to worker.secret" not in pool.worker.output


@pytest.mark.long
def test_knowing_a_trainer_id_does_not_allow_impersonation(tmp_path: Path) -> None:
    """One hello of another user with the id, which the status shows, stopped a training."""
    pool = PoolProcesses(tmp_path)
    keys = tmp_path / "keys"
    folders = {user: tmp_path / f"of {user}" for user in ("ann", "ben")}
    try:
        _pool.make_key_folder(str(keys))
        for user, folder in folders.items():
            _pool.make_user_keys(str(keys), user, str(folder))
        pool.start_controller("--keys", str(keys))
        worker = pool.start_worker("--keys", str(keys))
        ((_, worker_endpoint, _),) = worker.served()
        options: dict[str, Any] = {"batch_size": 4, "timeout": 30}
        loader = DataLoader(
            Augmented(400),
            pool=Pool(pool.endpoint, keys=str(folders["ben"]), code_paths=[CODE]),
            **options,
        )
        batches = iter(loader)
        next(batches)
        status = json.loads(_pool.pool_status(pool.endpoint, str(keys), SERVED_SECONDS_MAX))
        (bens_id,) = (int(trainer["id"], 16) for trainer in status["trainers"])
        with RawSocket(DEALER) as ann:
            ann.use_key(folders["ann"], "trainer", "worker")
            ann.connect(worker_endpoint)
            ann.send(hello(bens_id, link=2**32 - 1))
            (answer,) = ann.receive()
            assert (answer[:4], answer[6]) == (b"PNT1", 2)  # refused
            assert b"belongs to another key or process" in answer
        with RawSocket(DEALER) as ann:
            ann.use_key(folders["ann"], "trainer", "controller")
            ann.connect(pool.endpoint)
            for message in (trainer_report(bens_id), farewell_of_trainer(bens_id)):
                ann.send(message)
                (answer,) = ann.receive()
                assert answer[6] == REFUSAL
                assert b"belongs to another key or process" in answer
        assert 1 + sum(1 for _ in batches) == 100
        status = json.loads(_pool.pool_status(pool.endpoint, str(keys), SERVED_SECONDS_MAX))
        (offence,) = status["controller"]["offences"]
        assert (offence["by"], offence["count"]) == ("the user ann", 2)
        told = f"claimed to be trainer {bens_id:016x}, but is not"
        assert re.search(f"refused 2 times, .*the user ann {told}", status_text(PoolStatus(status)))
        worker.wait_for_lines(
            lambda line: f"claims to be trainer {bens_id:016x}" in line and "the user ann" in line
        )
    finally:
        pool.close()


@pytest.mark.long
def test_own_workers_accept_trainer_of_pool_with_separate_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer shows other keys to its local workers than to a pool with separate keys."""
    pool = PoolProcesses(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", pool.environment["XDG_RUNTIME_DIR"])
    keys = tmp_path / "keys"
    try:
        _pool.make_key_folder(str(keys))
        pool.start_controller("--keys", str(keys))  # which has no workers
        options: dict[str, Any] = {"batch_size": 4, "timeout": 30}
        loader = DataLoader(
            Augmented(8),
            pool=Pool(pool.endpoint, keys=str(keys), code_paths=[CODE]),
            num_workers=1,
            **options,
        )
        assert [len(batch["index"]) for batch in loader] == [4, 4]
    finally:
        pool.close()


@pytest.mark.long
def test_workers_reject_trainers_without_assignment(tmp_path: Path) -> None:
    """A user whose quota is 0 greeted the workers themselves, and all others were locked out."""
    pool = PoolProcesses(tmp_path)
    keys, anns = tmp_path / "keys", tmp_path / "of ann"
    try:
        _pool.make_key_folder(str(keys))
        _pool.make_user_keys(str(keys), "ann", str(anns))
        terms = tmp_path / "terms.json"
        terms.write_text('{"users": {"ann": {"quota": 0}}}')
        pool.start_controller("--keys", str(keys), "--terms", str(terms))
        ((_, worker_endpoint, _),) = pool.start_worker("--keys", str(keys)).served()
        anns_id = run_id(anns, "trainer")
        with RawSocket(DEALER) as reports, RawSocket(DEALER) as greetings:
            reports.use_key(anns, "trainer", "controller")
            reports.connect(pool.endpoint)
            greetings.use_key(anns, "trainer", "worker")
            greetings.connect(worker_endpoint)
            for link in range(1, 11):
                reports.send(trainer_report(anns_id))
                greetings.send(hello(anns_id, link=link))
                (answer,) = greetings.receive()
                assert (answer[:4], answer[6]) == (b"PNT1", 2)  # refused
                assert b"the pool's controller has not assigned it to this trainer yet" in answer
            options: dict[str, Any] = {"batch_size": 4, "timeout": 30}
            loader = DataLoader(
                Augmented(8), pool=Pool(pool.endpoint, keys=str(keys), code_paths=[CODE]), **options
            )
            assert [len(batch["index"]) for batch in loader] == [4, 4]
    finally:
        pool.close()


@pytest.mark.long
def test_deleted_user_key_is_rejected_and_new_key_accepted(tmp_path: Path) -> None:
    """Keys were read when a process started: a removed client was served until all were
    restarted."""
    pool = PoolProcesses(tmp_path)
    keys = tmp_path / "keys"
    folders = {user: tmp_path / f"of {user}" for user in ("ann", "ben", "cid")}
    options: dict[str, Any] = {"batch_size": 4, "timeout": 30}

    def loader(user: str) -> DataLoader[Any]:
        return DataLoader(
            Augmented(40),
            pool=Pool(pool.endpoint, keys=str(folders[user]), code_paths=[CODE]),
            **options,
        )

    try:
        _pool.make_key_folder(str(keys))
        for user in ("ann", "ben"):
            _pool.make_user_keys(str(keys), user, str(folders[user]))
        pool.start_controller("--keys", str(keys))
        worker = pool.start_worker("--keys", str(keys), processes=2)
        anns, bens = loader("ann"), loader("ben")
        for one in (anns, bens):
            assert sum(1 for _ in one) == 10
        (keys / "ann.user.public").unlink()
        with pytest.raises(PenstockError, match="does not accept this key"):
            while True:
                for _ in anns:
                    pass
        worker.wait_for_lines(lambda line: "no longer accepted: the keys of ann" in line, 2)
        assert sum(1 for _ in bens) == 10
        _pool.make_user_keys(str(keys), "cid", str(folders["cid"]))
        worker.wait_for_lines(lambda line: "now accepted: the keys of cid" in line, 2)
        until = time.monotonic() + SERVED_SECONDS_MAX
        while True:  # until the controller has looked at its folder as well
            try:
                assert sum(1 for _ in loader("cid")) == 10
                break
            except PenstockError:
                assert time.monotonic() < until
    finally:
        pool.close()


@pytest.mark.long
def test_deleted_machine_key_excludes_only_that_machine(tmp_path: Path) -> None:
    """All workers had one key, so no single machine could be excluded."""
    pool = PoolProcesses(tmp_path)
    keys = tmp_path / "keys"
    folders = {machine: tmp_path / f"of {machine}" for machine in ("beta", "gamma")}
    options: dict[str, Any] = {"batch_size": 2, "timeout": 60}
    torch.manual_seed(7)
    expected = digests(DataLoader(Augmented(1600), seeding="batch", batch_size=2))

    def status() -> PoolStatus:
        said = _pool.pool_status(pool.endpoint, str(keys), SERVED_SECONDS_MAX)
        return PoolStatus(json.loads(said))

    def machines(of: Callable[[dict[str, Any]], bool]) -> list[str]:
        return sorted(worker["machine"] for worker in status().fields["workers"] if of(worker))

    try:
        _pool.make_key_folder(str(keys))
        for machine, folder in folders.items():
            _pool.make_machine_keys(str(keys), machine, str(folder))
        pool.start_controller("--keys", str(keys))
        workers = {one: pool.start_worker("--keys", str(folders[one])) for one in folders}
        dataset = Augmented(1600, seconds=0.02)  # so that both are useful
        torch.manual_seed(7)
        batches = iter(
            DataLoader(
                dataset, pool=Pool(pool.endpoint, keys=str(keys), code_paths=[CODE]), **options
            )
        )
        found: list[str] = []

        def train_until(is_over: Callable[[], bool]) -> None:
            deadline = time.monotonic() + SECONDS_MAX
            while not is_over():
                assert time.monotonic() < deadline, status_text(status())
                if len(found) < len(expected) - 100:
                    found.extend(digests(itertools.islice(batches, 1)))

        train_until(lambda: machines(lambda one: one["trainer"] is not None) == [*folders])
        shown = status_text(status())
        assert " (beta) " in shown and " (gamma) " in shown
        (keys / "beta.machine.public").unlink()
        train_until(lambda: machines(lambda one: True) == ["gamma"])
        found += digests(batches)
        assert found == expected
        assert workers["beta"].wait() == 1  # that is no longer admitted
        assert "does not accept this key" in workers["beta"].output
    finally:
        pool.close()


def train(batches: Iterable[dict[str, Any]]) -> Iterator[float]:
    """The loss of each step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in batches:
        loss = model(batch["x"] / 10_000).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


@pytest.mark.long
def test_key_rotation_does_not_interrupt_training(tmp_path: Path) -> None:
    """To replace a pool's keys, all trainings had to end: the old keys were rejected at once."""
    pool = PoolProcesses(tmp_path)
    keys = tmp_path / "keys"
    hosts = {host: tmp_path / f"{host}-host" for host in ("controller", "worker", "ann")}
    options: dict[str, Any] = {"batch_size": 2, "timeout": 60}
    torch.manual_seed(7)
    expected = [*train(DataLoader(Augmented(10_000), seeding="batch", batch_size=2))]

    def manage(*arguments: str) -> None:
        made = Process(["keys", *arguments], pool.environment)
        assert made.wait() == 0, made.output

    def copy_to(host: str) -> None:
        """In the order of the how-to."""
        publics = keys.glob("*.public")
        former_first = sorted(publics, key=lambda path: ".former." not in path.name)
        secrets = [] if host == "ann" else [keys / f"{host}.secret"]
        for path in [*former_first, *secrets]:
            if host != "ann" or path.name.startswith(("controller.", "worker.")):
                shutil.copy(path, hosts[host])

    def loader(folder: Path, count: int) -> DataLoader[Any]:
        return DataLoader(
            Augmented(count),
            pool=Pool(pool.endpoint, keys=str(folder), code_paths=[CODE]),
            **options,
        )

    try:
        manage(str(keys))
        manage(str(keys), "--user", "ann", "--out", str(hosts["ann"]))
        for host in ("controller", "worker"):
            hosts[host].mkdir(mode=0o700)
            copy_to(host)
        retired = tmp_path / "retired"
        shutil.copytree(keys, retired)
        controller = pool.start_controller("--keys", str(hosts["controller"]))
        workers = [pool.start_worker("--keys", str(hosts["worker"])) for _ in range(2)]
        torch.manual_seed(7)
        losses = train(iter(loader(hosts["ann"], 10_000)))
        found: list[float] = []

        def train_until_all_are_known() -> None:
            ids = {worker.served()[0][0] for worker in workers}
            deadline = time.monotonic() + SECONDS_MAX
            while True:
                said = _pool.pool_status(pool.endpoint, str(keys), SERVED_SECONDS_MAX)
                status = json.loads(said)
                users = [trainer["user"] for trainer in status["trainers"]]
                if {worker["id"] for worker in status["workers"]} == ids and users == ["ann"]:
                    return
                assert time.monotonic() < deadline, said
                if len(found) < len(expected) - 100:
                    found.append(next(losses))

        found.append(next(losses))
        train_until_all_are_known()
        manage(str(keys), "--rotate")
        for host in hosts:
            copy_to(host)
        assert controller.end() == 0
        pool.start_controller("--keys", str(hosts["controller"]), bind=pool.endpoint)
        train_until_all_are_known()
        for place in range(2):
            assert workers[place].end() == 0
            workers[place] = pool.start_worker("--keys", str(hosts["worker"]))
            train_until_all_are_known()
        for folder in (*hosts.values(), keys):
            manage(str(folder), "--finish")
        for worker in workers:
            worker.wait_for_lines(lambda line: "the former keys are no longer accepted" in line)
        found += losses
        assert found == expected

        assert sum(1 for _ in loader(keys, 8)) == 4
        for name in ("controller.public", "worker.public"):
            shutil.copy(keys / name, retired)
        words = "does not accept this key"
        until = time.monotonic() + SERVED_SECONDS_MAX
        with pytest.raises(PenstockError, match=words):
            while time.monotonic() < until:  # until the controller has looked at its folder, too
                _pool.pool_status(pool.endpoint, str(retired), SERVED_SECONDS_MAX)
        with pytest.raises(PenstockError, match=words):
            next(iter(loader(retired, 8)))
    finally:
        pool.close()


@pytest.mark.long
def test_keys_of_another_pool_are_reported_by_worker_and_operator(
    pool: KeyedPool, tmp_path: Path
) -> None:
    others = tmp_path / "others"
    _pool.make_key_folder(str(others))
    words = "the server has a different key than expected"
    worker = pool.start_wrong_worker("--keys", str(others))
    with pytest.raises(PenstockError, match=f"{words}.*penstock keys"):
        _pool.pool_status(pool.endpoint, str(others), SERVED_SECONDS_MAX)
    worker.wait_for_lines(lambda line: words in line and "penstock keys" in line)
    assert worker.end() == 0  # the right controller may start to listen there
    pool.expect_served()


@pytest.mark.long
def test_keys_of_another_pool_are_reported_by_the_trainer(pool: KeyedPool, tmp_path: Path) -> None:
    others = tmp_path / "others"
    _pool.make_key_folder(str(others))
    with pytest.raises(RuntimeError) as raised:
        next(iter(pool.loader(others, timeout=2)))
    said = str(raised.value)
    del raised  # its traceback keeps the iterator alive
    assert "the server has a different key than expected" in said


def keys_with_swapped_roles(pool: KeyedPool, role: str, real: str, folder: Path) -> Path:
    """Keys whose files give ``role`` as the role of the pair of the role ``real``, and vice
    versa."""
    shutil.copytree(pool.keys, folder)
    for kind in ("public", "secret"):
        shutil.copy(pool.keys / f"{real}.{kind}", folder / f"{role}.{kind}")
        shutil.copy(pool.keys / f"{role}.{kind}", folder / f"{real}.{kind}")
    return folder


def test_key_of_another_role_is_rejected(pool: KeyedPool, tmp_path: Path) -> None:
    workers = {
        real: pool.start_wrong_worker(
            "--keys",
            str(keys_with_swapped_roles(pool, "worker", real, tmp_path / f"worker-{real}")),
        )
        for real in ("trainer", "operator")
    }
    for real in ("worker", "operator"):
        keys = keys_with_swapped_roles(pool, "trainer", real, tmp_path / f"trainer-{real}")
        with pytest.raises(
            PenstockError, match=f"rejected this trainer.*the key belongs to an? {real}"
        ):
            next(iter(pool.loader(keys)))
    for real in ("worker", "trainer"):
        keys = keys_with_swapped_roles(pool, "operator", real, tmp_path / f"operator-{real}")
        for attempt in (
            lambda keys=keys: _pool.pool_status(pool.endpoint, str(keys), SERVED_SECONDS_MAX),
            lambda keys=keys: _pool.drain_worker(pool.endpoint, str(keys), 1, SERVED_SECONDS_MAX),
        ):
            with pytest.raises(PenstockError, match=f"the key belongs to an? {real}"):
                attempt()
    for role in ("worker", "trainer", "operator"):
        keys = keys_with_swapped_roles(pool, role, "controller", tmp_path / f"{role}-controller")
        with RawSocket(DEALER, timeout_s=1) as client:
            client.use_key(keys, role, "controller")
            shutil.copy(pool.keys / "controller.public", keys)
            client.connect(pool.endpoint)
            client.send(STATUS_REQUEST)
            with pytest.raises(BlockingIOError):
                client.receive()
    pool.expect_served()
    for real, worker in workers.items():
        assert worker.wait() == 1
        assert f"rejected this worker: the key belongs to a{'n' * (real[0] == 'o')} "
        assert real in worker.output


def test_controller_rejects_messages_of_another_role(pool: KeyedPool) -> None:
    worker_id = int(pool.worker.served()[0][0], 16)
    for role, message in (
        ("worker", trainer_report(7)),
        ("worker", STATUS_REQUEST),
        ("worker", drain_request(worker_id)),
        ("trainer", worker_report(7, "tcp://127.0.0.1:9")),
        ("trainer", drain_request(worker_id)),
        ("operator", trainer_report(7)),
    ):
        with RawSocket(DEALER) as client:
            client.use_key(pool.keys, role, "controller")
            client.connect(pool.endpoint)
            client.send(message)
            (answer,) = client.receive()
            assert answer[6] == REFUSAL
            assert b"may not send this request to a controller" in answer
            assert role.encode() in answer
    pool.expect_served()


@pytest.mark.long
def test_only_trainers_reach_a_worker(pool: KeyedPool) -> None:
    for role, answers in (
        ("worker", False),
        ("operator", False),
        ("controller", False),
        ("trainer", True),
    ):
        with RawSocket(DEALER, timeout_s=SERVED_SECONDS_MAX if answers else 1) as client:
            client.use_key(pool.keys, role, "worker")
            client.connect(pool.worker_endpoint)
            client.send(hello(trainer_id=7, version=1))  # which is answered by a rejection
            if answers:
                assert client.receive()[0][:4] == b"PNT1"
            else:
                with pytest.raises(BlockingIOError):
                    client.receive()
    pool.expect_served()


# ---- Keys that cannot be used


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def open_to_others(name: str, mode: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).chmod(mode)


def linked(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).rename(folder / "elsewhere")
        (folder / name).symlink_to(folder / "elsewhere")

    return damage


def swapped(role: str) -> Callable[[Path], None]:
    """The secret of another role is in the file."""

    def damage(folder: Path) -> None:
        other = "trainer" if role != "trainer" else "worker"
        shutil.copy(folder / f"{other}.secret", folder / f"{role}.secret")

    return damage


def cut_short(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, 20)


@pytest.mark.long
def test_exposed_or_mismatched_keys_are_rejected(
    pool: KeyedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = []
    for role in ROLES:
        damages: list[tuple[Callable[[Path], None], str]] = [
            (shutil.rmtree, "create keys with penstock keys, or correct the path"),
            (without(f"{role}.secret"), f"pass a folder with {role}.secret"),
            (without("controller.public"), "controller.public failed"),
            (open_to_others(f"{role}.secret", 0o640), "chmod go= "),
            (open_to_others("controller.public", 0o602), "chmod go= "),
            (open_to_others("", 0o711), "chmod go= "),
            (linked(f"{role}.secret"), "symbolic link"),
            (swapped(role), f"{role}.secret"),
            (cut_short(f"{role}.secret"), "copy the file again"),
        ]
        for number, (damage, words) in enumerate(damages):
            keys = tmp_path / f"{role}-{number}"
            shutil.copytree(pool.keys, keys)
            damage(keys)
            if role == "worker":
                if number in (0, 3, 7):  # each takes the import of torch
                    workers.append((pool.start_wrong_worker("--keys", str(keys)), words))
                continue
            said = ""
            if role == "trainer":
                with pytest.raises((PenstockError, ValueError, OSError)) as raised:
                    next(iter(pool.loader(keys)))
                said = str(raised.value)
            else:
                arguments = {
                    "controller": ["controller", "--bind", "tcp://127.0.0.1:0"],
                    "operator": ["status", "--controller", pool.endpoint],
                }[role]
                code, said = run(monkeypatch, *arguments, "--keys", str(keys))
                assert code == 1
            assert words in said, (role, number, said)
            assert str(keys) in said
    for worker, words in workers:
        assert worker.wait() == 1
        assert words in worker.output
    pool.expect_served()


@pytest.mark.long
def test_listening_on_public_address_needs_keys(
    pool: KeyedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = pool.start_wrong_worker("--bind", "tcp://0.0.0.0:0")
    for bind in ("tcp://0.0.0.0:0", "tcp://*:0"):
        code, said = run(monkeypatch, "controller", "--bind", bind)
        assert code == 1
        assert "no keys restrict the access" in said and "penstock keys DIR" in said
    assert worker.wait() == 1
    assert "no keys restrict the access" in worker.output and "penstock keys DIR" in worker.output


# ---- Strangers


def greeting(mechanism: bytes) -> bytes:
    """The first bytes of a ZMTP 3 client."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


GIANT = b"\x06" + struct.pack(">Q", 1 << 62)  # a command that would be as long
BOMB = b"\x01\x01x" * 500_000  # parts of one byte of a message that does not end
OPENINGS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "zeros": bytes(100_000),
    "ones": b"\xff" * 100_000,
    "ZMTP 1": b"\x01\x00\x02\x00x",
    "NULL": greeting(b"NULL")
    + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    + b"\x00\x01x",
    "a giant length": greeting(b"CURVE") + GIANT,
    "a giant length without keys": greeting(b"NULL") + GIANT,
    "a bomb of parts": greeting(b"CURVE") + BOMB,
    "a bomb of parts without keys": greeting(b"NULL") + BOMB,
}


def test_garbage_connections_are_closed_without_memory_growth(pool: KeyedPool) -> None:
    pool.expect_served()  # a worker's first batch makes its arena
    before = {pid: memory(pid) for _, pid in pool.servers}
    with contextlib.ExitStack() as stack:
        connections = []
        for endpoint, _ in pool.ports:
            for opening in OPENINGS.values():
                connection = stack.enter_context(connected(endpoint))
                connections.append(connection)
                with contextlib.suppress(ConnectionError):
                    connection.sendall(opening)
        pool.expect_served()
        for connection in connections:
            wait_closed(connection)
    for pid, was in before.items():
        now = memory(pid)
        assert now["VmHWM"] - was["VmHWM"] < GROWTH_MAX
        assert now["VmPeak"] - was["VmPeak"] < 2 * GROWTH_MAX  # stacks and arenas of threads


def test_clients_without_curve_get_no_answer(pool: KeyedPool) -> None:
    with contextlib.ExitStack() as stack:
        clients = []
        for endpoint, _ in pool.ports:
            for password in (None, "trainer"):
                client = stack.enter_context(RawSocket(DEALER, timeout_s=1))
                if password is not None:
                    client.use_password("trainer", password)
                client.connect(endpoint)
                client.send(STATUS_REQUEST if endpoint == pool.endpoint else hello(7))
                clients.append(client)
        pool.expect_served()
        for client in clients:
            with pytest.raises(BlockingIOError):
                client.receive()


@pytest.mark.long
def test_idle_connections_are_closed_and_block_no_client(pool: KeyedPool) -> None:
    count = 300
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft > 3 * count + 100, f"the test needs more descriptors than {soft}"
    before = {pid: memory(pid)["VmHWM"] for _, pid in pool.servers}
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(connected(endpoint))
            for endpoint, _ in pool.ports
            for _ in range(count)
        ]
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"\xff")  # the server learns of it only now
        pool.expect_served()
        for connection in connections:
            wait_closed(connection)
    for pid, was in before.items():
        assert memory(pid)["VmHWM"] - was < GROWTH_MAX
    pool.expect_served()


# ---- Misbehaving peers with a valid key


def test_oversized_messages_are_dropped(pool: KeyedPool) -> None:
    before = {pid: memory(pid)["VmHWM"] for _, pid in pool.servers}
    for (endpoint, _), server, role in zip(
        pool.servers, ("controller", "worker"), ("worker", "trainer"), strict=True
    ):
        with RawSocket(DEALER, timeout_s=1) as client:
            client.use_key(pool.keys, role, server)
            client.connect(endpoint)
            for _ in range(100_000):
                client.send_part(b"x", is_last=False)
            client.send_part(b"x", is_last=True)
            client.send(bytes((8 << 20) + 1))  # a part above the cap
            for _ in range(50_000):
                client.send_part(b"x", is_last=False)  # of a message that never ends
            pool.expect_served()
    for pid, was in before.items():
        assert memory(pid)["VmHWM"] - was < GROWTH_MAX


@pytest.mark.long
def test_connection_flood_of_one_user_blocks_no_other_user(
    tmp_path: Path,
) -> None:
    """A key let its holder take every descriptor of the controller, and of workers."""
    limit = 512
    within = ("prlimit", f"--nofile={limit}:{limit}", "--")
    pool = PoolProcesses(tmp_path)
    keys = tmp_path / "keys"
    folders = {user: tmp_path / f"of {user}" for user in ("ann", "mallory")}
    try:
        _pool.make_key_folder(str(keys))
        for user, folder in folders.items():
            _pool.make_user_keys(str(keys), user, str(folder))
        controller = pool.start_controller("--keys", str(keys), within=within)
        worker = pool.start_worker("--keys", str(keys), processes=2, within=within)
        _, worker_endpoint, worker_pid = worker.served(2)[0]
        options: dict[str, Any] = {"batch_size": 4, "timeout": 30}
        of_ann = Pool(pool.endpoint, keys=str(folders["ann"]), code_paths=[CODE])
        batches = iter(DataLoader(Augmented(400), pool=of_ann, **options))
        next(batches)
        mallorys_id = run_id(folders["mallory"], "trainer")
        for endpoint, server, pid in (
            (pool.endpoint, "controller", controller.process.pid),
            (worker_endpoint, "worker", worker_pid),
        ):
            assert re.search(rf"Max open files +{limit} ", Path(f"/proc/{pid}/limits").read_text())
            with RawSocket(DEALER, timeout_s=1) as crowd:
                crowd.use_key(folders["mallory"], "trainer", server)
                for number in range(2 * limit):
                    crowd.connect_once_more(endpoint, number)
                    is_hello = server == "worker"
                    crowd.send(hello(mallorys_id, link=number + 1) if is_hello else b"here")
                    with contextlib.suppress(BlockingIOError):
                        crowd.receive()
                    if number % 100 == 0:
                        next(batches)
                begun = time.monotonic()
                status = json.loads(_pool.pool_status(pool.endpoint, str(keys), SERVED_SECONDS_MAX))
                assert {one["user"] for one in status["trainers"]} == {"ann"}
                loader = DataLoader(Augmented(8), pool=of_ann, **options)
                assert [len(batch["index"]) for batch in loader] == [4, 4]
                assert time.monotonic() - begun < SERVED_SECONDS_MAX
                assert len(os.listdir(f"/proc/{pid}/fd")) < limit * 3 // 4
        assert sum(1 for _ in batches) > 0
    finally:
        pool.close()


# ---- Information that the pool exposes about itself


def test_processes_listen_only_on_their_loopback_addresses(
    pool: KeyedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCH)
    listening_addresses = importlib.import_module("one_process").listening_addresses
    pool.expect_served()
    for endpoints, pid in (
        ([pool.endpoint], pool.controller.process.pid),
        ([pool.worker_endpoint, pool.worker.data_endpoint()], pool.worker_pid),
    ):
        ports = [int(endpoint.rpartition(":")[2]) for endpoint in endpoints]
        expected = sorted(f"0100007F:{port:04X}" for port in ports)
        assert sorted(listening_addresses(pid)) == expected
    assert listening_addresses(pool.worker.process.pid) == []
    begun = listening_addresses(os.getpid())
    batches = iter(pool.loader(pool.hosts["trainer"]))
    next(batches)
    assert listening_addresses(os.getpid()) == begun


def test_secrets_do_not_appear_in_output_or_proc(pool: KeyedPool) -> None:
    secrets = [(pool.keys / f"{role}.secret").read_text().strip() for role in ROLES]
    loader = pool.loader(pool.hosts["trainer"])
    next(iter(loader))
    shown = {
        "state": repr(loader.state_dict()),
        "stats": repr(loader.stats()),
        "options": repr(vars(loader)),
        "status": json.dumps(pool.status()),
        "controller's output": pool.controller.output,
        "worker's output": pool.worker.output,
    }
    for pid in (pool.controller.process.pid, pool.worker.process.pid, pool.worker_pid):
        for name in ("cmdline", "environ"):
            text = Path(f"/proc/{pid}/{name}").read_bytes().decode("utf-8", "replace")
            assert text
            shown[f"{name} of {pid}"] = text
    for where, text in shown.items():
        assert not [secret for secret in secrets if secret in text], where


NOBODY = 65534
# Root can read everything, so another user has to try.
AS_USER: dict[str, Any] = (
    {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
)


@contextlib.contextmanager
def folder_of_user() -> Iterator[str]:
    """Not one of the test's, which other users cannot enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        if AS_USER:
            os.chown(folder, NOBODY, NOBODY)
        yield folder


def read_as_user(pid: int, name: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["cat", f"/proc/{pid}/{name}"], capture_output=True, **AS_USER)


def assert_proc_files_unreadable(pid: int) -> None:
    for name in ("environ", "mem", "maps", "auxv"):
        tried = read_as_user(pid, name)
        assert tried.returncode != 0 and b"Permission denied" in tried.stderr, name
        assert not tried.stdout


def test_processes_of_same_user_cannot_read_worker_memory() -> None:
    """The worker's key is in it, and the processes of jobs have the same user."""
    with folder_of_user() as folder, contextlib.ExitStack() as stack:
        program = shutil.copy(Path(str(_pool.__file__)).with_name("penstock-server"), folder)
        environment = {"XDG_RUNTIME_DIR": folder, "PATH": os.environ["PATH"]}
        command = [program, "--bind=tcp://127.0.0.1:0", f"--parent={os.getpid()}"]
        server = subprocess.Popen([*command, "--", "sleep", "600"], env=environment, **AS_USER)
        stack.callback(server.wait)
        stack.callback(server.kill)

        def warm_pids() -> list[int]:
            listed = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
            return [int(pid) for pid in listed.split() if read_as_user(int(pid), "environ").stdout]

        deadline = time.monotonic() + SECONDS_MAX
        while not (found := warm_pids()):  # another process of the user is there to be read
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        for pid in found:
            stack.callback(os.kill, pid, signal.SIGKILL)
        assert_proc_files_unreadable(server.pid)


# Runs a command as another user, once it is sent a line. The kernel closes the memory of a process
# that changes its user, so that it has to be opened again.
AS_NOBODY = f"""
import ctypes, os, sys
from penstock.cli import command_line, elastic_commands, pool_commands
if os.getuid() == 0:
    os.setgroups([])
    os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
    os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE
print("ready", flush=True)
sys.stdin.readline()
sys.exit(command_line.main())
"""


@pytest.mark.parametrize("command", ["controller", "up --engine local --max 1 --state state"])
def test_processes_of_same_user_cannot_read_controller_memory(command: str) -> None:
    """Its key is in it, and jobs on its machine may have the same user."""
    with folder_of_user() as folder, contextlib.ExitStack() as stack:
        environment = {"XDG_RUNTIME_DIR": folder, "HOME": folder, "PATH": os.environ["PATH"]}
        process = subprocess.Popen(
            [sys.executable, "-c", AS_NOBODY, *command.split(), "--bind", "tcp://127.0.0.1:0"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment,
        )  # fmt: skip
        stack.callback(process.communicate)
        stack.callback(process.kill)
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        assert read_as_user(process.pid, "environ").stdout  # without the command it can be read
        process.stdin.write("go\n")
        process.stdin.flush()
        while "listens at" not in (line := process.stdout.readline()):
            assert line, process.wait()
        assert_proc_files_unreadable(process.pid)
