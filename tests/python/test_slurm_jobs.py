# SPDX-License-Identifier: Apache-2.0
"""Penstock's input to a Slurm job: the names in its script, and its environment. Slurm itself is
not used."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engines.engine import EngineRefusal, WorkerCommand
from penstock.engines.slurm_engine import SlurmEngine, worker_environment


@pytest.mark.parametrize(
    "name",
    ["pk-1-1; touch x", "pk-1-$(id)", "pk-1-1\n", "pk-1", "pk-xyz-1", "pk-1-\u0661", "", "-1"],
)
def test_invalid_worker_name_is_rejected_before_any_script(tmp_path: Path, name: str) -> None:
    engine = SlurmEngine(WorkerCommand("tcp://127.0.0.1:9", None, 60.0), "pk-1-", tmp_path / "logs")
    with pytest.raises(EngineRefusal, match="name must be pk-HEX-NUMBER, got") as refusal:
        engine.spawn(["pk-1-7", name])
    assert refusal.value.granted_count == 0
    assert not (tmp_path / "logs").exists()


def test_worker_environment_excludes_secrets() -> None:
    needed = {
        "PATH": "/usr/bin", "HOME": "/home/ann", "LD_LIBRARY_PATH": "/opt/lib", "LC_ALL": "C",
        "VIRTUAL_ENV": "/venv", "PYTHONPATH": "/code", "PENSTOCK_CODE_PATHS": "/code",
        "OMP_NUM_THREADS": "1", "TMPDIR": "/scratch", "XDG_RUNTIME_DIR": "/run/user/7",
        "SLURM_CONF": "/etc/slurm.conf", "SBATCH_RESERVATION": "spare",
    }  # fmt: skip
    others = {
        "PENSTOCK_KEYS": "/keys", "PENSTOCK_API_TOKEN": "x", "CONDA_TOKEN": "x", "MY_PATH": "x",
        "AWS_SECRET_ACCESS_KEY": "x", "SSH_AUTH_SOCK": "x", "DATABASE_URL": "x", "A_KEY": "x",
    }  # fmt: skip
    assert worker_environment({**needed, **others}, []) == needed
    named = ["AWS_SECRET_ACCESS_KEY", "ABSENT"]
    more = {"AWS_SECRET_ACCESS_KEY": "x"}
    assert worker_environment({**needed, **others}, named) == {**needed, **more}
