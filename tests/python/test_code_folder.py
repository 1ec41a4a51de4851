# SPDX-License-Identifier: Apache-2.0
"""A folder of modules lives as long as the process that made it, regardless of other users of
/tmp."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from penstock.pool.job_code import CodeFolder

HOLDER = """\
import sys
from penstock.pool.job_code import CodeFolder
folder = CodeFolder()
print(folder.path, flush=True)
sys.stdin.read()
folder.remove()
"""
# The process that made the folder has ended, and its child has it.
HANDED_ON = """\
import os, sys
from penstock.pool.job_code import CodeFolder
folder = CodeFolder()
if os.fork() > 0:
    os._exit(0)
print(folder.path, flush=True)
os.close(1)
sys.stdin.read()
"""
MAKER = """\
import os, sys
from penstock.pool.job_code import CodeFolder
for _ in range(50):
    folder = CodeFolder()
    assert os.path.isdir(folder.path), folder.path
    folder.remove()
    assert not os.path.exists(folder.path), folder.path
"""
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # looked up again
    return tmp_path


def can_enter_a_namespace() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0


@contextlib.contextmanager
def holder(program: str) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A process that has a folder, and the folder's path."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip()), process
    finally:
        process.communicate(timeout=90)


@pytest.mark.slow
@pytest.mark.parametrize(
    "within",
    [
        (),
        pytest.param(
            NAMESPACE,
            marks=pytest.mark.skipif(not can_enter_a_namespace(), reason="no PID namespaces"),
        ),
    ],
    ids=["same pids", "other pids"],
)
def test_folder_of_a_live_process_is_kept(within: Sequence[str]) -> None:
    """Two containers with a shared /tmp and different pids removed each other's modules."""
    folder = CodeFolder()
    module = Path(folder.path) / "module.py"
    module.write_text("")
    subprocess.run([*within, sys.executable, "-c", MAKER], check=True, timeout=90)
    assert module.exists()
    folder.remove()


@pytest.mark.slow
def test_folder_held_by_a_forked_child_is_kept() -> None:
    with holder(HANDED_ON) as (path, process):
        process.wait(timeout=90)
        CodeFolder().remove()
        assert path.exists()


@pytest.mark.slow
def test_folder_of_a_killed_process_is_removed_by_the_next() -> None:
    with holder(HOLDER) as (path, process):
        (path / "module.py").write_text("")
        process.kill()
    assert path.exists()
    CodeFolder().remove()
    assert not path.exists()


def test_folder_is_private_and_removed_with_its_contents(temporary: Path) -> None:
    folder = CodeFolder()
    assert Path(folder.path).stat().st_mode & 0o777 == 0o700
    (Path(folder.path) / "package").mkdir()
    folder.remove()
    assert list(temporary.iterdir()) == []


def test_links_and_files_with_the_same_prefix_are_kept(temporary: Path) -> None:
    made = CodeFolder()
    prefix = Path(made.path).name.rpartition("-")[0]
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (temporary / f"{prefix}-link").symlink_to(elsewhere)
    (temporary / f"{prefix}-file").write_text("")
    CodeFolder().remove()
    assert elsewhere.exists()
    assert (temporary / f"{prefix}-file").exists()
    made.remove()


@pytest.mark.slow
def test_concurrent_processes_keep_each_others_folders() -> None:
    makers = [subprocess.Popen([sys.executable, "-c", MAKER]) for _ in range(4)]
    assert [maker.wait(timeout=90) for maker in makers] == [0] * 4
