# SPDX-License-Identifier: Apache-2.0
"""The isolation of job processes: datasets that try to reach forbidden resources, in a pool, and a
worker's messages where isolation is not available."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ending_datasets import Numbers
from pool_datasets import CODE
from pool_processes import PoolProcesses, pool_of
from torch.utils.data import Dataset

from penstock import DataLoader, Pool, _pool
from penstock.cli.command_line import main
from penstock.cli.command_parser import CommandError, CommandParser
from penstock.cli.isolation_options import add_isolation, isolation_arguments, isolation_of
from penstock.engines.engine import WorkerCommand
from penstock.pool import job_place
from penstock.pool.job_isolation import IsolationOptions, JobIsolation, plan_isolation
from penstock.pool.job_place import IsolatedJobs, JobPlace

IS_ROOT = os.geteuid() == 0
UIDS = "70000-70003"


def refusal(**settings: Any) -> str:
    return _pool.JobSeparation(**settings).refusal()


NO_MOUNTS = refusal(hiding="mounts", hidden=["/nowhere"])
NO_RULES = refusal(hiding="rules", hidden=["/nowhere"])
NO_NAMESPACE = refusal(no_network="namespace")

needs_hiding = pytest.mark.skipif(bool(NO_MOUNTS and NO_RULES), reason=f"{NO_MOUNTS}; {NO_RULES}")
needs_mounts = pytest.mark.skipif(bool(NO_MOUNTS), reason=NO_MOUNTS)
needs_rules = pytest.mark.skipif(bool(NO_RULES), reason=NO_RULES)
needs_namespace = pytest.mark.skipif(bool(NO_NAMESPACE), reason=NO_NAMESPACE)
needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root gives processes other accounts")


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def outcome(attempt: Callable[[], object]) -> str:
    """The reason for the failure, or the result."""
    try:
        return f"done: {attempt()}"
    except OSError as error:
        return type(error).__name__


class Trying(Dataset[dict[str, Any]]):
    """Tries to reach its surroundings."""

    def __init__(self, keys: str = "", outside: str = "", port: int = 0) -> None:
        self.keys = keys
        self.outside = outside
        self.port = port

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        parent = os.getppid()  # the warm process
        found = {
            "read keys": outcome(lambda: bool(Path(self.keys, "worker.secret").read_bytes())),
            "write keys": outcome(lambda: Path(self.keys, "eve.user.public").write_text("x")),
            "keys of the parent": outcome(
                lambda: len(Path(f"/proc/{parent}/root{self.keys}/worker.secret").read_bytes())
            ),
            "memory of the parent": outcome(lambda: open(f"/proc/{parent}/mem", "rb").close()),
            "signal the parent": outcome(lambda: os.kill(parent, 0)),
            "read outside": outcome(lambda: Path(self.outside, "rows").read_text()),
            "write outside": outcome(lambda: Path(self.outside, "rows").write_text("spoilt")),
            "temporary file": outcome(_write_temporary),
            "connect": outcome(
                lambda: socket.create_connection(("127.0.0.1", self.port), 10).close()
            ),
            "uid": os.getuid(),
            "folder": tempfile.gettempdir(),
            "core": resource.getrlimit(resource.RLIMIT_CORE),
            "data": resource.getrlimit(resource.RLIMIT_DATA)[0],
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        }
        return {name: str(value) for name, value in found.items()}


def _write_temporary() -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")
    return Path(file.name).parent.name


@contextlib.contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def tried(pool: PoolProcesses, *, keys: str, outside: Path, port: int = 0) -> dict[str, str]:
    dataset = Trying(keys, str(outside), port)
    options: dict[str, Any] = {"batch_size": None, "timeout": 60}
    (found,) = DataLoader(dataset, pool=Pool(pool.endpoint, code_paths=[CODE]), **options)
    return dict(found)


def outside_of(folder: Path) -> Path:
    outside = folder / "outside"
    outside.mkdir()
    (outside / "rows").write_text("rows")
    return outside


def expect_served(pool: PoolProcesses) -> None:
    numbers = DataLoader(
        Numbers(), pool=Pool(pool.endpoint, code_paths=[CODE]), batch_size=None, timeout=60
    )
    assert list(numbers) == list(range(6))


# ---- In a pool


@pytest.mark.slow
@needs_hiding
def test_job_cannot_access_keys_or_surrounding_processes(pool: PoolProcesses) -> None:
    """A user's dataset read worker.secret, and its holder received the jobs of others."""
    outside = outside_of(pool.folder)
    worker = pool.start_worker()
    keys = _pool.shared_key_folder()
    with listening() as port:
        found = tried(pool, keys=keys, outside=outside, port=port)
    for name in ("read keys", "write keys", "keys of the parent", "memory of the parent"):
        assert not found[name].startswith("done"), (name, found[name])
    if _pool.landlock_version() >= 6:
        assert found["signal the parent"] == "PermissionError"
    assert found["read outside"] == "done: rows"
    assert found["write outside"] == "done: 6"
    assert found["connect"] == "done: None"
    assert found["core"] == "(0, 0)"
    assert not Path(keys, "eve.user.public").exists()
    assert "not kept from" not in worker.output


# Root in a user namespace that allows no further mount namespaces.
_WITHOUT_MOUNTS = (
    "unshare", "--user", "--map-root-user", "sh", "-c",
    'echo 0 > /proc/sys/user/max_mnt_namespaces && exec "$@"', "sh",
)  # fmt: skip


@pytest.mark.slow
@needs_rules
@pytest.mark.skipif(
    subprocess.run([*_WITHOUT_MOUNTS, "true"], capture_output=True).returncode != 0,
    reason="needs a user namespace in which mount namespaces can be forbidden",
)
def test_landlock_protects_keys_where_mounts_are_refused(pool: PoolProcesses) -> None:
    outside = outside_of(pool.folder)
    worker = pool.start_worker(within=_WITHOUT_MOUNTS)
    worker.wait_for_lines(lambda line: "Landlock protects the keys from jobs" in line)
    found = tried(pool, keys=_pool.shared_key_folder(), outside=outside)
    assert found["read keys"] == "PermissionError"
    assert found["write keys"] == "PermissionError"
    assert found["read outside"] == "done: rows"
    assert found["write outside"] == "done: 6"
    assert found["temporary file"].startswith("done: tmp-")


@pytest.mark.slow
def test_job_without_isolation_has_the_access_of_its_account(pool: PoolProcesses) -> None:
    pool.start_worker("--isolate", "none")
    found = tried(pool, keys=_pool.shared_key_folder(), outside=outside_of(pool.folder))
    assert found["read keys"] == "done: True"
    assert found["core"] == "(0, 0)"


@pytest.mark.slow
@needs_mounts
@needs_rules
@needs_namespace
def test_fully_isolated_job_has_its_own_folders_and_no_network(pool: PoolProcesses) -> None:
    outside = outside_of(pool.folder)
    writes = pool.folder / "writes"
    writes.mkdir()
    arguments = ["--isolate", "keys,files,tmp,network", f"--job-writes={outside}:{writes}"]
    worker = pool.start_worker(*arguments, "--job-files", "200")
    with listening() as port:
        first = tried(pool, keys=_pool.shared_key_folder(), outside=outside, port=port)
        inner = pool.folder / "inner"
        inner.mkdir()
        second = tried(pool, keys=_pool.shared_key_folder(), outside=inner, port=port)
    assert not first["read keys"].startswith("done")
    assert first["write outside"] == "done: 6"  # --job-writes names it
    assert first["temporary file"] == "done: tmp"
    assert first["folder"] == "/tmp"
    assert not first["connect"].startswith("done")
    assert first["files"] == "200"
    assert not second["write outside"].startswith("done")
    assert not list(Path("/tmp").glob("tmp*penstock*"))
    worker.wait_for_lines(lambda line: "no network, enforced by a network namespace" in line)
    expect_served(pool)


@pytest.mark.slow
@needs_rules
def test_file_isolation_allows_writes_only_in_own_folders(pool: PoolProcesses) -> None:
    outside = outside_of(pool.folder)
    pool.start_worker("--isolate", "files", "--job-memory", str(64 << 30))
    found = tried(pool, keys=_pool.shared_key_folder(), outside=outside)
    assert found["read outside"] == "done: rows"
    assert found["write outside"] == "PermissionError"
    assert found["temporary file"].startswith("done: tmp-")
    assert found["data"] == str(64 << 30)
    assert (outside / "rows").read_text() == "rows"


@pytest.mark.slow
@needs_root
def test_job_has_its_own_uid(pool: PoolProcesses) -> None:
    folder = pool.folder
    while folder != folder.parent:  # pytest's are closed to other accounts
        folder.chmod(folder.stat().st_mode | 0o011)
        folder = folder.parent
    arguments = ("--isolate", "user", "--job-uids", UIDS)
    plan = plan_or_refusal(IsolationOptions(frozenset({"user"}), job_uids=(70000, 70003)))
    if isinstance(plan, str):
        pytest.skip(plan)
    pool.start_worker(*arguments)
    found = tried(pool, keys=_pool.shared_key_folder(), outside=outside_of(pool.folder))
    assert found["uid"] in [str(uid) for uid in range(70000, 70004)]
    assert not found["read keys"].startswith("done")
    assert found["write outside"] == "PermissionError"
    assert found["temporary file"].startswith("done: tmp-")
    assert found["signal the parent"] == "PermissionError"


class Killed(Numbers):
    """Leaves a file in its temporary folder, and is killed."""

    def __init__(self, note: str) -> None:
        super().__init__(1)
        self.note = note

    def __getitem__(self, index: int) -> int:
        folder = tempfile.gettempdir()
        Path(folder, "left").write_text("x")
        Path(self.note).write_text(folder)
        os.kill(os.getpid(), signal.SIGKILL)
        return index


@pytest.mark.slow
@needs_rules
def test_private_folder_of_a_killed_job_is_removed(pool: PoolProcesses) -> None:
    note = pool.folder / "writes" / "note"
    note.parent.mkdir()
    worker = pool.start_worker("--isolate", "files", "--job-writes", str(note.parent))
    options: dict[str, Any] = {"batch_size": None, "timeout": 60}
    with pytest.raises(Exception, match="SIGKILL"):
        list(DataLoader(Killed(str(note)), pool=Pool(pool.endpoint, code_paths=[CODE]), **options))
    folder = Path(note.read_text())
    assert folder.name.startswith("tmp-")
    expect_served(pool)  # by the process after it
    assert not folder.exists()
    assert worker.process.poll() is None


# ---- Messages of a worker


def plan_or_refusal(options: IsolationOptions, keys: str = "/nowhere") -> Any:
    try:
        return plan_isolation(options, keys)
    except ValueError as error:
        return str(error)


class NoSeparation:
    """A machine that refuses some of the isolation."""

    def __init__(self, refused: set[str], **settings: Any) -> None:
        self.settings = settings
        self.refused = refused

    def refusal(self, needed: Any = ()) -> str:
        given = {str(value) for value in self.settings.values()} | {
            name for name, value in self.settings.items() if value
        }
        found = sorted(self.refused & given)
        return f"{found[0]} is refused" if found else ""


def refuse(monkeypatch: pytest.MonkeyPatch, *refused: str) -> None:
    def separation(**settings: Any) -> NoSeparation:
        return NoSeparation(set(refused), **settings)

    monkeypatch.setattr(_pool, "JobSeparation", separation)


def test_unavailable_default_isolation_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "mounts", "rules")
    plan = plan_or_refusal(IsolationOptions())
    assert plan.isolation.hiding == ""
    (warning,) = plan.warnings
    assert "not kept from the keys: mounts is refused, and rules is refused" in warning


def test_keys_are_hidden_by_rules_where_mounts_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse(monkeypatch, "mounts")
    plan = plan_or_refusal(IsolationOptions(), "/nowhere/keys")
    assert plan.isolation.hiding == "rules"
    assert plan.warnings == []
    assert "created directly in /nowhere or above" in plan.messages[0]


def test_keys_in_tmp_do_not_restrict_tmp_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container without mount namespaces a job could no longer make files in /tmp."""
    refuse(monkeypatch, "mounts")
    tmp_path.chmod(0o1777)
    plan = plan_or_refusal(IsolationOptions(), str(tmp_path / "keys"))
    assert plan.isolation.hiding == ""
    assert f"jobs could not access new files in {tmp_path}" in plan.warnings[0]
    named = plan_or_refusal(IsolationOptions(frozenset({"keys"})), str(tmp_path / "keys"))
    assert named.isolation.hiding == "rules"


@pytest.mark.parametrize(
    ("levels", "refused", "said"),
    [
        ("keys", ("mounts", "rules"), "got keys: mounts is refused, and rules is refused"),
        ("files", ("are_writes_bounded",), "got files: are_writes_bounded is refused"),
        ("tmp", ("private_tmp",), "got tmp: private_tmp is refused"),
        ("network", ("namespace", "filter"), "got network: namespace is refused; filter is"),
    ],
)
def test_unavailable_requested_level_is_an_error(
    monkeypatch: pytest.MonkeyPatch, levels: str, refused: tuple[str, ...], said: str
) -> None:
    refuse(monkeypatch, *refused)
    assert said in plan_or_refusal(IsolationOptions(frozenset(levels.split(","))))


def test_filter_replaces_an_unavailable_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "namespace")
    plan = plan_or_refusal(IsolationOptions(frozenset({"network"})))
    assert plan.isolation.no_network == "filter"
    assert "a filter of system calls (namespace is refused)" in plan.messages[0]


def test_key_folder_containing_modules_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modules").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    plan = plan_or_refusal(IsolationOptions(), str(tmp_path))
    assert plan.isolation.hiding == ""
    assert "modules, from which jobs load code" in plan.warnings[0]
    named = plan_or_refusal(IsolationOptions(frozenset({"keys"})), str(tmp_path))
    assert "keep the keys in a separate folder" in named


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (IsolationOptions(job_writes=("/tmp",)), "--job-writes requires --isolate files"),
        (IsolationOptions(job_uids=(1, 2)), "--job-uids requires --isolate user"),
        (IsolationOptions(frozenset({"user"})), "--isolate user requires --job-uids FIRST-LAST"),
        (IsolationOptions(job_cpu_weight=5), "--job-cpu-weight requires --job-group"),
        (
            IsolationOptions(frozenset({"files"}), job_writes=("/nowhere",)),
            "must name existing folders, got /nowhere",
        ),
        (IsolationOptions(job_group="/tmp"), "must be a folder of cgroup v2, got /tmp"),
    ],
)
def test_inconsistent_options_are_rejected(options: IsolationOptions, said: str) -> None:
    assert said in plan_or_refusal(options)


@pytest.mark.skipif(not IS_ROOT, reason="the limit bounds all accounts but root's")
def test_process_limit_is_rejected_for_root() -> None:
    assert "which RLIMIT_NPROC does not bound" in plan_or_refusal(IsolationOptions(job_processes=9))


@pytest.mark.slow
def test_worker_exits_with_a_message_if_isolation_is_unavailable(
    pool: PoolProcesses, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["worker", "--controller", pool.endpoint, "--job-group", str(pool.folder)]
    monkeypatch.setattr("sys.argv", ["penstock", *arguments])
    assert main() == 1
    assert "--job-group must be a folder of cgroup v2" in capsys.readouterr().err


# ---- Options


def parsed(*arguments: str) -> IsolationOptions:
    parser = CommandParser("worker", "worker", "")
    add_isolation(parser)
    return isolation_of(parser.parse(list(arguments)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--isolate", "kyes"], "contains the unknown level 'kyes'; did you mean keys?"),
        (
            ["--isolate", "everything"],
            "'everything'; levels are keys, files, tmp, network, user, or none",
        ),
        (["--job-writes", "data"], "must be absolute paths of folders"),
        (["--job-uids", "0-5"], "must be two uids above 0"),
        (["--job-uids", "9-5"], "must be two uids above 0"),
        (["--job-memory", "4G"], "must be an integer from"),
    ],
)
def test_invalid_option_is_reported(arguments: list[str], said: str) -> None:
    with pytest.raises(CommandError) as raised:
        parsed(*arguments)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--isolate=none"],
        ["--isolate=files,keys", "--job-writes=/a:/b", "--job-files=100", "--job-processes=7"],
        ["--isolate=user", "--job-uids=5-9", "--job-memory=1048576", "--job-group=/x"],
    ],
)
def test_options_round_trip_through_the_arguments(arguments: list[str]) -> None:
    assert isolation_arguments(parsed(*arguments)) == arguments


def test_engine_workers_get_the_options_of_penstock_up() -> None:
    isolation = isolation_arguments(parsed("--isolate=files", "--job-files=100"))
    command = WorkerCommand("tcp://127.0.0.1:9", None, 60.0, isolation=isolation)
    assert command.arguments()[-2:] == ["--isolate=files", "--job-files=100"]


# ---- Groups and accounts


def paused_process(prepare: Callable[[], object]) -> int:
    """A process that has called ``prepare``, and waits to be killed."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            prepare()
            os.write(told, b"x")
            os.close(told)
            signal.pause()
        os._exit(1)
    os.close(told)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    return pid


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Path]:
    """A cgroup v2 folder for the test."""
    for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        folder = Path(mount, f"penstock-test-{os.getpid()}")
        if Path(mount, "cgroup.controllers").exists():
            try:
                folder.mkdir()
            except OSError as error:
                pytest.skip(f"groups cannot be made in {mount}: {error}")
            break
    else:
        pytest.skip("this machine has no cgroup v2")
    try:
        yield folder
    finally:
        for one in folder.iterdir():
            if one.is_dir():
                one.rmdir()
        folder.rmdir()


def test_job_cgroup_is_removed_with_its_processes(group: Path, tmp_path: Path) -> None:
    assert plan_or_refusal(
        IsolationOptions(frozenset(), job_group=str(group))
    ).isolation.group == str(group)
    jobs = IsolatedJobs(JobIsolation(group=str(group)), str(tmp_path))
    place = jobs.try_prepare(1, str(tmp_path / "job-1"), print)
    assert place is not None
    pid = paused_process(JobPlace(**json.loads(json.dumps(asdict(place)))).enter)
    (path,) = [one for one in group.iterdir() if one.is_dir()]
    assert (path / "cgroup.procs").read_text().split() == [str(pid)]
    jobs.clear(1)
    assert not path.exists()
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_cgroup_left_by_a_killed_worker_is_removed_by_the_next(group: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    (group / f"penstock-{pid}-4").mkdir()
    (group / f"penstock-{os.getpid()}-9").mkdir()
    job_place.JobGroups(str(group), {})
    assert [one.name for one in group.iterdir() if one.is_dir()] == [f"penstock-{os.getpid()}-9"]


def test_memory_limit_is_used_without_a_memory_controller(group: Path) -> None:
    if "memory" in (group / "cgroup.controllers").read_text().split():
        pytest.skip("this group has the controller")
    plan = plan_or_refusal(IsolationOptions(frozenset(), job_memory=1 << 30, job_group=str(group)))
    assert plan.isolation.data_bytes == 1 << 30
    assert f"{group} has no controller memory" in plan.messages[0]
    assert "has the controller cpu" in plan_or_refusal(
        IsolationOptions(frozenset(), job_cpu_weight=10, job_group=str(group))
    )


@needs_root
def test_workers_share_uids_and_stray_processes_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_place, "_UIDS_FOLDER", str(tmp_path / "uids"))
    told: list[str] = []
    first, second = (
        IsolatedJobs(JobIsolation(uids=[70000, 70001]), str(tmp_path)) for _ in range(2)
    )
    for jobs, job in ((first, 1), (second, 1)):
        assert jobs.try_prepare(job, str(tmp_path / f"job-{job}"), told.append) is not None
    assert second.try_prepare(2, str(tmp_path / "job-2"), told.append) is None
    assert "all uids of --job-uids 70000-70001 are in use" in told[0]
    stray = paused_process(lambda: os.setresuid(70000, 70000, 70000))
    first.clear(1)
    _, status = os.waitpid(stray, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert second.try_prepare(3, str(tmp_path / "job-3"), told.append) is not None
    second.close()


@pytest.mark.slow
@needs_mounts
def test_ended_worker_leaves_no_job_folders(pool: PoolProcesses) -> None:
    worker = pool.start_worker("--isolate", "tmp,files")
    expect_served(pool)
    assert worker.end() == 0
    assert list((pool.folder / "tmp").iterdir()) == []
