# SPDX-License-Identifier: Apache-2.0
"""Programs whose modules are in their folder or in PYTHONPATH, with workers that have none of
these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_processes import PoolProcesses, pool_of

import penstock

pytestmark = pytest.mark.slow

SECONDS_MAX = 120
PACKAGE_FOLDER = str(Path(penstock.__file__).resolve().parent.parent)

FOLDERS = """
import json
import known_elsewhere, pkg.part
from penstock.pool.own_code import own_folders, pack_own_code
print(json.dumps([
    [[folder.path, None if folder.modules is None else sorted(folder.modules)]
        for folder in own_folders()],
    sorted(path for packed in pack_own_code(set()) for path in packed.paths),
]))
"""

# Its dataset imports one module when it is made, and another when it is read.
TRAINING = """
from torch.utils.data import DataLoader

from beside import Doubled

if __name__ == "__main__":
    loader = DataLoader(Doubled(6), batch_size=2, num_workers=1, timeout=60)
    print(loader.stats().iterator, *(batch.tolist() for batch in loader), loader.stats().iterator)
"""
BESIDE = """
import os
from helper import times_two

class Doubled:
    def __init__(self, count):
        self.count = count
        self.trainer = os.getpid()

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        from package.lazily import offset
        assert os.getpid() != self.trainer
        return times_two(index) + offset()
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def run(arguments: list[str], folder: Path, environment: dict[str, str], code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.parametrize("way", ["file", "module", "text"])
def test_packed_code_is_program_folder_and_imported_modules(tmp_path: Path, way: str) -> None:
    program = write_tree(
        tmp_path / "program",
        {
            "train.py": FOLDERS,
            "lazily.py": "",
            "pkg/__init__.py": "",
            "pkg/part.py": "",
            "pkg/train.py": FOLDERS,
            "pkg/words.txt": "",
            "model.pt": "",
        },
    )
    elsewhere = write_tree(
        tmp_path / "elsewhere", {"known_elsewhere.py": "", "unknown.py": "", "more/x.py": ""}
    )
    arguments = {
        "file": [str(program / "train.py")],
        "module": ["-m", "pkg.train"],
        "text": ["-c", FOLDERS],
    }[way]
    environment = {**os.environ, "PYTHONPATH": f"{elsewhere}{os.pathsep}{PACKAGE_FOLDER}"}
    folders, files = json.loads(run(arguments, tmp_path if way == "file" else program, environment))
    assert folders == [[str(program), None], [str(elsewhere), ["known_elsewhere"]]]
    expected = ["lazily.py", "pkg/__init__.py", "pkg/part.py", "pkg/train.py", "pkg/words.txt"]
    assert files == sorted(
        [
            str(elsewhere / "known_elsewhere.py"),
            *(str(program / name) for name in [*expected, "train.py"]),
        ]
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no safe path")
def test_program_folder_is_not_packed_under_safe_path(tmp_path: Path) -> None:
    program = write_tree(tmp_path / "program", {"train.py": FOLDERS, "lazily.py": ""})
    elsewhere = write_tree(
        tmp_path / "elsewhere",
        {"known_elsewhere.py": "", "pkg/__init__.py": "", "pkg/part.py": ""},
    )
    environment = {**os.environ, "PYTHONPATH": f"{elsewhere}{os.pathsep}{PACKAGE_FOLDER}"}
    environment["PYTHONSAFEPATH"] = "1"
    folders, _ = json.loads(run([str(program / "train.py")], tmp_path, environment))
    assert folders == [[str(elsewhere), ["known_elsewhere", "pkg"]]]


def test_only_imported_modules_of_too_large_folder_are_packed(tmp_path: Path) -> None:
    program = write_tree(
        tmp_path,
        {
            "train.py": FOLDERS,
            "known_elsewhere.py": "",
            "pkg/__init__.py": "",
            "pkg/part.py": "",
            "lazily.py": "",
            "huge.py": " " * (33 << 20),
        },
    )
    done = subprocess.run(
        [sys.executable, str(program / "train.py")],
        env={**os.environ, "PYTHONPATH": PACKAGE_FOLDER},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=True,
    )
    _, files = json.loads(done.stdout)
    names = ["known_elsewhere.py", "pkg/__init__.py", "pkg/part.py"]
    assert files == [str(program / name) for name in names]
    assert "only the modules that the program has imported" in done.stderr
    assert "more than 32 MiB of code, the limit for workers (largest files: huge.py" in done.stderr


@pytest.mark.long
def test_script_with_sibling_modules_runs_on_a_pool(pool: PoolProcesses, tmp_path: Path) -> None:
    """No worker could run the job: "No module named 'beside'"."""
    program = write_tree(
        tmp_path / "program",
        {
            "train.py": TRAINING,
            "beside.py": BESIDE,
            "package/__init__.py": "",
            "package/lazily.py": "def offset():\n    return 1\n",
        },
    )
    shared = write_tree(tmp_path / "shared", {"helper.py": "def times_two(x):\n    return 2 * x\n"})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    pool.start_worker()
    environment = {**pool.environment, "PENSTOCK_POOL": pool.endpoint}
    environment["PYTHONPATH"] = os.pathsep.join([str(shared), PACKAGE_FOLDER])
    out = run(["-m", "penstock", "run", str(program / "train.py")], elsewhere, environment)
    assert out.split("\n")[0] == "None [1, 3] [5, 7] [9, 11] pool"


@pytest.mark.long
def test_code_option_adds_modules_to_packed_code(pool: PoolProcesses, tmp_path: Path) -> None:
    beside = BESIDE.replace("from helper import times_two\n", "").replace(
        "        from package", "        from helper import times_two\n        from package"
    )
    program = write_tree(
        tmp_path / "program",
        {
            "train.py": TRAINING,
            "beside.py": beside,
            "package/__init__.py": "",
            "package/lazily.py": "def offset():\n    return 1\n",
        },
    )
    write_tree(tmp_path / "shared", {"helper.py": "def times_two(x):\n    return 2 * x\n"})
    pool.start_worker()
    environment = {**pool.environment, "PENSTOCK_POOL": pool.endpoint}
    environment["PYTHONPATH"] = PACKAGE_FOLDER
    command = ["-m", "penstock", "run"]
    out = run([*command, "--code", "../shared", "train.py"], program, environment)
    assert out.split("\n")[0] == "None [1, 3] [5, 7] [9, 11] pool"
    told = run([*command, "--code", "../none", "train.py"], program, environment, code=2)
    assert "--code must name an existing folder or .py file, got '../none'" in told
    environment["PENSTOCK_CODE_PATHS"] = "/not/there"
    told = run([*command, "train.py"], program, environment, code=1)
    assert "the environment variable PENSTOCK_CODE_PATHS must name existing folders or .py" in told
    assert "separated by ':', got '/not/there'" in told
