# SPDX-License-Identifier: Apache-2.0
"""The recipes of `deploy`, as far as this machine can check them: units by systemd's check, scripts
by shellcheck and on real Slurm daemons, and each command by penstock's parser."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_pools import needs_slurm
from parsed_commands import Parse, parsing
from pool_processes import SECONDS_MAX, PoolProcesses
from slurm_cluster import SlurmCluster

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sbatch"))
COMPOSE = DEPLOY / "docker" / "compose.yaml"
PENSTOCK = "/opt/penstock/bin/penstock"


def variables() -> dict[str, str]:
    """The variables of the units' environment file, and the variables that Slurm sets."""
    lines = (DEPLOY / "systemd" / "pool.env").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("=", 1) for line in lines if not line.startswith("#")]
    return {**dict(pairs), "SLURM_CPUS_PER_TASK": "4", "PENSTOCK_KEYS": "keys"}


def filled(command: str) -> list[str]:
    def value(found: re.Match[str]) -> str:
        return variables()[found[1] or found[2]]

    return shlex.split(re.sub(r"\$(?:\{(\w+)(?::-\w*)?\}|(\w+))", value, command))


def commands() -> Iterator[list[str]]:
    for unit in UNITS:
        for line in re.findall(r"^ExecStart=(.*)$", unit.read_text(encoding="utf-8"), re.MULTILINE):
            assert line.startswith(PENSTOCK)
            yield filled(line)[1:]
    for service in yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"].values():
        for command in (
            service["command"],
            service.get("healthcheck", {}).get("test", ["", ""])[1:],
        ):
            if command[:1] == ["penstock"]:
                yield command[1:]
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        found = re.findall(r"^(?:exec |srun .*?)?penstock (\w+ .*?)(?: &)?$", text, re.MULTILINE)
        assert found, script
        for line in found:
            yield filled(line.replace('"$@"', "train.py"))


COMMANDS = [command for command in commands() if command[0] != "run"]


@pytest.mark.parametrize("command", COMMANDS, ids=shlex.join)
def test_penstock_accepts_the_deployment_commands(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parse: Parse = parsing(monkeypatch)
    monkeypatch.setenv("PENSTOCK_POOL", "tcp://alpha:7000")  # of the services and the scripts
    parse(command)


def test_every_deployed_command_was_found() -> None:
    assert {command[0] for command in COMMANDS} == {"controller", "worker", "status", "keys"}


def verify(unit: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_each_unit(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text(encoding="utf-8").replace(PENSTOCK, sys.executable)
    (tmp_path / unit.name).write_text(text)
    done = verify(tmp_path / unit.name)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    (tmp_path / unit.name).write_text(
        text.replace("TimeoutStop", "TimeStop").replace("Type=", "T=")
    )
    assert "Unknown key" in verify(tmp_path / unit.name).stderr, "the check finds a wrong key"


def test_worker_unit_signals_only_its_main_process() -> None:
    """By default systemd signals every process, and the parent would signal the workers again: a
    second SIGTERM ends a worker in the middle of a batch."""
    text = (DEPLOY / "systemd" / "penstock-workers.service").read_text(encoding="utf-8")
    assert "\nKillMode=mixed\n" in text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_pass_the_shell_checks(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed; bash -n found nothing")
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_compose_services_exist_and_share_one_image() -> None:
    compose: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
    services = compose["services"]
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
        assert all(
            volume.partition(":")[0] in ("keys", "${PENSTOCK_FOLDER")
            for volume in service["volumes"]
        )  # noqa: E501
        assert service["image"] == "penstock:local"
        build = service["build"]
        assert (COMPOSE.parent / build["context"] / build["dockerfile"]).is_file()
        host = service["environment"]["PENSTOCK_POOL"].removeprefix("tcp://").partition(":")[0]
        assert host in services
    assert set(compose["volumes"]) == {"keys"}


def test_compose_accepts_the_file() -> None:
    """Compose itself. Debian 12 has no package of it; the file was checked against the published
    schema by hand, without errors."""
    docker = shutil.which("docker")
    command = [str(docker), "compose", "--file", str(COMPOSE), "config", "--quiet"]
    if (
        docker is None
        or subprocess.run([docker, "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("docker compose is not installed")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


class Jobs:
    """Slurm's daemons, and an environment in which jobs find penstock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = PoolProcesses(folder)
        self.cluster = SlurmCluster(folder / "slurm", node_count=2, cpus=2)
        (folder / "bin").mkdir()
        command = folder / "bin" / "penstock"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock "$@"\n')
        command.chmod(0o755)
        path = f"{folder / 'bin'}:{self.cluster.environment['PATH']}"
        self.environment = {**self.pool.environment, **self.cluster.environment, "PATH": path}

    def sbatch(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sbatch", "--output=job.out", *arguments],
            cwd=self.folder,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=2 * SECONDS_MAX,
        )

    def close(self) -> None:
        self.cluster.close()
        self.pool.close()


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    for name in ("PENSTOCK_POOL", "PENSTOCK_KEYS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    started = Jobs(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", started.pool.environment["XDG_RUNTIME_DIR"])
    try:
        yield started
    finally:
        started.close()


@pytest.mark.long
@pytest.mark.slow
@needs_slurm
def test_slurm_training_uses_workers_on_all_its_nodes(jobs: Jobs) -> None:
    (jobs.folder / "train.py").write_text(
        textwrap.dedent(
            """
            import os, sys, time
            from torch.utils.data import DataLoader, Dataset

            class Nodes(Dataset):
                def __len__(self): return 120
                def __getitem__(self, index):
                    own = "SLURM_STEP_ID" not in os.environ
                    time.sleep(1.0 if own else 0.05)
                    return index, int(os.environ.get("SLURM_NODEID", 0)), own

            batches = list(DataLoader(Nodes(), batch_size=1, num_workers=1))
            print("in order", [int(index) for index, _, _ in batches] == list(range(120)))
            print("nodes", sorted({int(node) for _, node, own in batches if not own}))
            sys.exit(int(sys.argv[1]))
            """
        )
    )
    script = str(DEPLOY / "slurm" / "train.sbatch")
    done = jobs.sbatch(
        "--wait", "--nodes=2", "--cpus-per-task=2", script, "train.py", "7",
        PENSTOCK_HOST="127.0.0.1",
    )  # fmt: skip
    told = (jobs.folder / "job.out").read_text()
    assert done.returncode == 7, done.stderr + told
    assert "in order True\n" in told
    assert "nodes [0, 1]\n" in told
    assert [path.name for path in jobs.folder.glob("penstock-keys-*")] == []


@pytest.mark.long
@pytest.mark.slow
@needs_slurm
def test_slurm_workers_serve_an_external_pool(jobs: Jobs) -> None:
    jobs.pool.start_controller()
    script = str(DEPLOY / "slurm" / "workers.sbatch")
    done = jobs.sbatch("--array=1-2", "--cpus-per-task=2", script, PENSTOCK_POOL=jobs.pool.endpoint)
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + SECONDS_MAX
    while len(workers := jobs.pool.status()["workers"]) < 4:
        assert time.monotonic() < deadline, (workers, (jobs.folder / "job.out").read_text())
        time.sleep(0.2)
    jobs.cluster.ask("scancel", "--name=penstock-workers")
    while jobs.pool.status()["workers"]:
        assert time.monotonic() < deadline, jobs.pool.status()
        time.sleep(0.2)
    refused = jobs.sbatch("--wait", "--cpus-per-task=1", script)
    assert refused.returncode != 0
    assert "PENSTOCK_POOL: is not set" in (jobs.folder / "job.out").read_text()
