# SPDX-License-Identifier: Apache-2.0
"""``penstock env`` prints the information for a bug report, even on a broken installation."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

import penstock
from penstock import _C, _pool
from penstock._packages_on_path import packages_on_path
from penstock.cli import environment_command as report_module
from penstock.cli.environment_command import Report, environment_report, in_units, limit_facts
from penstock.secret_names import looks_secret


def env(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "env", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def report() -> Report:
    found: Report = json.loads(
        env(
            "--json",
            PENSTOCK_POOL="tcp://someone:word@127.0.0.1:7000",
            PENSTOCK_TEST_TOKEN="hush-hush",
            PENSTOCK_PASSPHRASE="hush-hush",
            PENSTOCK_DB_PWD="hush-hush",
            PENSTOCK_APIKEY_OF_ANN="hush-hush",
            PENSTOCK_BEARER="hush-hush",
            PENSTOCK_credentials="hush-hush",
            PENSTOCK_CODE_PATHS="/data/code",
            SLURM_JOB_ID="4711",
            PENSTOCK_KEYS=str(Path.home() / "keys"),
            UNRELATED_PASSWORD="hush-hush",
        )
    )
    return found


@pytest.mark.long
@pytest.mark.slow
def test_report_has_the_facts_of_penstock(report: Report) -> None:
    of_penstock = report["penstock"]
    assert of_penstock["version"] == [penstock.__version__]
    assert of_penstock["native part loads"][0].startswith("yes, ")
    built_with = torch.__version__.partition("+")[0]
    assert any(f"built with {built_with}, with" in line for line in of_penstock["native parts"])
    assert of_penstock["numerics"] == [f"{_C.numeric_fingerprint()[-1]:016x}"[:8]]
    files = str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    assert report["limits"]["limits"][0].startswith(f"files: {files}")


@pytest.mark.long
@pytest.mark.slow
def test_report_has_the_lines_of_collect_env(report: Report) -> None:
    lines = report["torch"]["collect env"]
    assert lines[0] == f"PyTorch version: {torch.__version__}"
    assert f"Libc version: {'-'.join(os.confstr('CS_GNU_LIBC_VERSION').split())}" in lines
    assert f"Is CUDA available: {torch.cuda.is_available()}" in lines


@pytest.mark.slow
def test_report_names_loaded_libraries_and_their_files(report: Report) -> None:
    assert re.match(r"4\.\d+\.\d+ \(.*/libzmq.*\)$", report["libraries"]["libzmq"][0])
    assert re.match(r"1\.\d+\.\d+ \(.*/libsodium.*\)$", report["libraries"]["libsodium"][0])
    of_crypto = report["libraries"]["libcrypto"]  # Python may have another one
    assert any(re.match(r"OpenSSL 3\..* \(.*/libcrypto.*\)$", line) for line in of_crypto)


@pytest.mark.slow
def test_report_hides_secrets(report: Report) -> None:
    assert report["environment"]["PENSTOCK_POOL"] == ["tcp://…@127.0.0.1:7000"]
    hidden = ("TEST_TOKEN", "PASSPHRASE", "DB_PWD", "APIKEY_OF_ANN", "BEARER", "credentials")
    for name in hidden:
        shown = report["environment"][f"PENSTOCK_{name}"]
        assert shown == ["set, 9 characters (not shown)"], name
    assert report["environment"]["PENSTOCK_CODE_PATHS"] == ["/data/code"]
    assert report["environment"]["SLURM_JOB_ID"] == ["4711"]
    assert report["environment"]["PENSTOCK_KEYS"] == ["~/keys"]
    text = json.dumps(report)
    assert "hush" not in text and "word@" not in text
    assert f'"{Path.home()}/' not in text


def test_secret_names_are_distinguished_from_others() -> None:
    secret = ("DB_PWD", "MY_PASS", "GPG_PASSPHRASE", "APIKEY", "api_key_of_ann", "SLURM_JWT")
    plain = ("PWD", "OLDPWD", "PATH", "OMP_NUM_THREADS", "PENSTOCK_POOL", "CUDA_VISIBLE_DEVICES")
    assert [name for name in (*secret, *plain) if looks_secret(name)] == [*secret]


@pytest.mark.long
@pytest.mark.slow
def test_text_report_has_every_section_and_fact(report: Report) -> None:
    lines = env().splitlines()
    sections = [name for name in report if name != "schema"]  # which is for programs
    assert [line for line in lines if line and line[0] != " "] == sections
    for section in ("penstock", "libraries", "limits", "torch"):
        for name in report[section]:
            assert any(line.startswith(f"  {name} ") for line in lines), name


@pytest.mark.slow
def test_broken_torch_is_reported_with_the_remaining_facts(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: no such file')")
    found = json.loads(env("--json", PYTHONPATH=str(tmp_path)))
    problem, python, system = found["torch"]["collect env"]
    assert problem.startswith("torch cannot be used: exit status 1: ")
    assert "OSError: libtorch_cpu.so: no such file" in problem
    assert python.startswith(f"Python {sys.version.split()[0]}") and "-glibc" in system
    assert found["penstock"]["native part loads"][0].startswith("no: exit status 1: ")
    assert found["limits"]["CPUs"][0].startswith(f"{os.cpu_count()} in total")


@pytest.mark.slow
def test_missing_torch_is_reported(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    done = subprocess.run(
        [tmp_path / "bare" / "bin" / "python", "-m", "penstock", "env", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PYTHONPATH": str(package_alone(tmp_path))},
    )
    assert done.returncode == 0, done.stderr
    assert "No module named 'torch'" in json.loads(done.stdout)["torch"]["collect env"][0]


def package_alone(folder: Path) -> Path:
    """A folder for Python's path with penstock and no other package."""
    (folder / "path").mkdir()
    (folder / "path" / "penstock").symlink_to(Path(penstock.__file__).parent)
    return folder / "path"


def test_crashing_native_part_does_not_end_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -SEGV $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert report_module._load_native_parts() == (
        "no: exit status -11: no output",
        "unknown",
        {},
    )


def test_torch_and_the_native_parts_are_loaded_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The report took the sum of both times."""
    program = tmp_path / "python"
    program.write_text(
        """#!/bin/sh
touch "$0.$$"
while [ "$(ls "$0".* | wc -l)" -lt 2 ]; do sleep 0.01; done
exit 3
"""
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    report = environment_report()
    assert report["penstock"]["native part loads"] == ["no: exit status 3: no output"]
    assert report["torch"]["collect env"][0].endswith("exit status 3: no output")


def test_unavailable_fact_is_replaced_by_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    facts = report_module._facts(**limit_facts(tmp_path))
    assert facts["shared memory"][0].startswith("unknown: FileNotFoundError: ")
    assert facts["memory left"] == ["unknown"]
    monkeypatch.setattr(report_module, "packages_on_path", lambda: 1 / 0)
    monkeypatch.setattr(sys, "executable", "/bin/false")  # instead of two imports of torch
    assert environment_report()["penstock"]["on the path"] == [
        "unknown: ZeroDivisionError: division by zero"
    ]


def test_pool_keys_are_listed_without_their_contents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PENSTOCK_KEYS", raising=False)
    assert report_module._pool_keys() == "PENSTOCK_KEYS is not set"
    folder = tmp_path / "keys"
    _pool.make_key_folder(str(folder))
    (folder / "worker.secret").unlink()
    monkeypatch.setenv("PENSTOCK_KEYS", str(folder))
    public_count = len(list(folder.glob("*.public")))
    secrets = ", ".join(sorted(path.name for path in folder.glob("*.secret")))
    assert secrets and report_module._pool_keys() == (
        f"{folder} (mode 700): {secrets}, {public_count} public keys"
    )


def test_container_limits_are_reported(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/outer/inner"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/outer/inner\n")
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text(f"{3 << 30}\n")
    (group.parent / "memory.current").write_text(f"{1 << 30}\n")
    (group / "cpu.max").write_text("100000 100000\n")
    facts = report_module._facts(**limit_facts(tmp_path))
    assert facts["memory limit"] == ["3.0 GiB"] and facts["memory left"] == ["2.0 GiB"]
    assert facts["CPUs"][0].endswith(", 1 by its cgroup quotas")


def test_installations_on_the_path_are_listed_in_order(tmp_path: Path) -> None:
    built, tree = tmp_path / "site" / "penstock", tmp_path / "tree" / "penstock"
    for folder, version in ((built, "0.2.0"), (tree, "0.3.0")):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "_version.py").write_text(f'__version__ = "{version}"\n')
    (built / "_pool.cpython-311.so").touch()
    (tmp_path / "link").symlink_to(tmp_path / "tree")
    path = [str(tmp_path / name) for name in ("none", "tree", "site", "link", "tree")]
    assert packages_on_path(path) == [(tree, "0.3.0", False), (built, "0.2.0", True)]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 50, "5120.0 TiB")]
)
def test_byte_counts_are_shown_with_units(count: int, text: str) -> None:
    assert in_units(count) == text
