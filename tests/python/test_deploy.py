# SPDX-License-Identifier: Apache-2.0
"""The recipes of `deploy`, as far as this machine can check them: units by systemd's check, scripts
by shellcheck and on real Slurm daemons, and each command by penstock's parser."""

from __future__ import annotations

import os
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
    return {**dict(pairs), "SLURM_CPUS_PER_TASK": "4", "PENSTOCK_KEYS": "keys", "cpus": "4"}


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


# For programs of jobs: on a busy machine their data would end before all workers have started.
WAIT_FOR_WORKERS = """
import json, os, time
from penstock import _pool

def wait_for_workers(count):
    place = os.environ["PENSTOCK_POOL"], os.environ["PENSTOCK_KEYS"]
    while len(json.loads(_pool.pool_status(*place, 60.0))["workers"]) < count:
        time.sleep(0.2)
"""


class Jobs:
    """Slurm's daemons, and an environment in which jobs find penstock."""

    def __init__(self, folder: Path, node_count: int) -> None:
        self.folder = folder
        self.pool = PoolProcesses(folder)
        self.cluster = SlurmCluster(folder / "slurm", node_count=node_count, cpus=2)
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
def jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Jobs]:
    """Two nodes, or as many as the test asks for."""
    for name in ("PENSTOCK_POOL", "PENSTOCK_KEYS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    started = Jobs(tmp_path, getattr(request, "param", 2))
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
        WAIT_FOR_WORKERS
        + textwrap.dedent(
            """
            import os, sys, time
            from torch.utils.data import DataLoader, Dataset

            class Nodes(Dataset):
                def __len__(self): return 120
                def __getitem__(self, index):
                    own = "SLURM_STEP_ID" not in os.environ
                    time.sleep(1.0 if own else 0.05)
                    return index, int(os.environ.get("SLURM_NODEID", 0)), own

            wait_for_workers(4)
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


HETJOB = DEPLOY / "slurm" / "hetjob.sbatch"


def submit_hetjob(jobs: Jobs, train_nodes: int, *arguments: str) -> tuple[int, str]:
    """Run a job with two nodes of workers; return its exit code and its output."""
    done = jobs.sbatch(
        *("--wait", f"--nodes={train_nodes}", "--cpus-per-task=2"),
        *(":", "--nodes=2", "--cpus-per-task=2", str(HETJOB), *arguments),
        PENSTOCK_HOST="127.0.0.1",
    )
    return done.returncode, (jobs.folder / "job.out").read_text() + done.stderr


@pytest.mark.long
@pytest.mark.slow
@needs_slurm
@pytest.mark.parametrize("jobs", [3], indirect=True)
def test_heterogeneous_job_has_its_workers_on_the_second_component(jobs: Jobs) -> None:
    (jobs.folder / "train.py").write_text(
        WAIT_FOR_WORKERS
        + textwrap.dedent(
            """
            import os, sys, time
            from torch.utils.data import DataLoader, Dataset

            class Nodes(Dataset):
                def __len__(self): return 120
                def __getitem__(self, index):
                    node = int(os.environ["SLURMD_NODENAME"].removeprefix("n"))
                    time.sleep(1.0 if node == 0 else 0.05)
                    return index, node

            wait_for_workers(4)
            batches = list(DataLoader(Nodes(), batch_size=1, num_workers=1))
            print("in order", [int(index) for index, _ in batches] == list(range(120)))
            print("trainer on", os.environ["SLURMD_NODENAME"])
            print("workers on", sorted({int(node) for _, node in batches} - {0}))
            sys.exit(int(sys.argv[1]))
            """
        )
    )
    code, told = submit_hetjob(jobs, 1, "train.py", "7")
    assert code == 7, told
    assert "in order True\n" in told
    assert "trainer on n0\n" in told
    assert "workers on [1, 2]\n" in told
    assert [path.name for path in jobs.folder.glob("penstock-keys-*")] == []


@pytest.mark.long
@pytest.mark.slow
@needs_slurm
@pytest.mark.parametrize("jobs", [4], indirect=True)
def test_torchrun_joins_the_nodes_of_the_first_component(jobs: Jobs) -> None:
    (jobs.folder / "train.py").write_text(
        WAIT_FOR_WORKERS
        + textwrap.dedent(
            """
            import os, time
            import torch, torch.distributed as dist
            from torch.utils.data import Dataset
            from penstock import DataLoader, Ranks

            class Nodes(Dataset):
                def __len__(self): return 64
                def __getitem__(self, index):
                    node = int(os.environ["SLURMD_NODENAME"].removeprefix("n"))
                    time.sleep(1.0 if node < 2 else 0.05)
                    return index, node

            dist.init_process_group("gloo")
            loader = DataLoader(Nodes(), num_workers=1, ranks=Ranks(global_batch_size=8))
            wait_for_workers(4)
            batches = list(loader)
            seen = torch.zeros(64)
            for indices, _ in batches:
                seen[indices] += 1
            dist.all_reduce(seen)
            nodes = torch.zeros(4)
            for _, places in batches:
                nodes[places] = 1
            dist.all_reduce(nodes)
            own = os.environ["SLURMD_NODENAME"]
            print(f"rank {dist.get_rank()} of {dist.get_world_size()}, each once "
                  f"{bool((seen == 1).all())}, workers on {nodes[2:].bool().tolist()}\\n", end="")
            with open(f"rank-on-{own}", "w") as file:
                file.write("done")
            dist.destroy_process_group()
            """
        )
    )
    code, told = submit_hetjob(jobs, 2, "-m", "torch.distributed.run", "train.py")
    assert code == 0, told
    for rank in range(2):
        assert f"rank {rank} of 2, each once True, workers on [True, True]\n" in told
    assert sorted(path.name for path in jobs.folder.glob("rank-on-*")) == [
        *("rank-on-n0", "rank-on-n1")
    ]


def test_heterogeneous_job_with_other_components_is_rejected(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(HETJOB), "train.py"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "SLURM_HET_SIZE": "3"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "the job must have 2 components, got 3; separate their options by ' : '\n"
    )
    assert [*tmp_path.iterdir()] == []
