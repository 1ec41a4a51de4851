# SPDX-License-Identifier: Apache-2.0
"""The source distribution contains the whole tree; the requirements of a build in isolation."""

from __future__ import annotations

import faulthandler
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from native_build import native_folder
from supported_versions import TORCHES

import penstock

ROOT = Path(__file__).resolve().parents[2]
_BUILD_S_MAX = 1800


def in_backend(expression: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Prints the build backend's answers, as pip would ask for them."""
    program = f"import sys; sys.path.insert(0, '.make'); import isolated_build; print({expression})"
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_BUILD_S_MAX,
        env={"PATH": "/usr/bin:/bin", **variables},
    )


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    done = in_backend(f"isolated_build.build_sdist({str(folder)!r})")
    assert done.returncode == 0, done.stderr
    return next(folder.iterdir())


@pytest.mark.slow
def test_sdist_contains_exactly_the_tracked_files(archive: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("this tree is no clone")
    tree = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    with tarfile.open(archive) as tar:
        packed = {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}
    made = {name for name in packed if name == "PKG-INFO" or ".egg-info/" in name}
    # Uncommitted files are not the archive's fault.
    untracked = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert sorted(tree - packed) == []
    assert sorted(packed - tree - made - {"setup.cfg", *untracked}) == []


@pytest.mark.slow
def test_sdist_name_and_folder_have_the_version(archive: Path) -> None:
    assert archive.name == f"penstock-{penstock.__version__}.tar.gz"
    with tarfile.open(archive) as tar:
        assert {name.partition("/")[0] for name in tar.getnames()} == {
            archive.name[: -len(".tar.gz")]
        }


def test_isolated_build_requires_the_named_torch() -> None:
    for variables, torch in (({}, TORCHES[-1]), ({"PENSTOCK_TORCH": "2.13"}, "2.13")):
        done = in_backend("isolated_build.get_requires_for_build_wheel()", **variables)
        assert f"'torch=={torch}.*'" in done.stdout or sys.version_info < (3, 11), done.stderr


def test_unsupported_torch_variable_fails_the_build() -> None:
    done = in_backend("isolated_build.get_requires_for_build_wheel()", PENSTOCK_TORCH="2.9")
    assert done.returncode == 1
    assert f"PENSTOCK_TORCH must be one of {', '.join(TORCHES)}, got '2.9'" in done.stderr


def test_setup_rejects_unsupported_torch(tmp_path: Path) -> None:
    folder = tmp_path / "torch-2.9.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path / "lib")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert f"penstock supports torch {TORCHES[0]} to {TORCHES[-1]}, and" in done.stderr
    assert "has torch 2.9.1; install a supported torch into it" in done.stderr


@pytest.mark.slow
def test_cmake_rejects_unsupported_torch(tmp_path: Path) -> None:
    header = tmp_path / "torch" / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    names = zip(("MAJOR", "MINOR", "PATCH"), (2, 9, 1), strict=True)
    header.write_text("\n".join(f"#define TORCH_VERSION_{name} {part}" for name, part in names))
    (tmp_path / "torch" / "lib").mkdir()
    done = subprocess.run(
        [
            *("cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(tmp_path / "build")),
            *(f"-DPyTorch_ROOT={tmp_path / 'torch'}", "-DPENSTOCK_BUILD_PYTHON=OFF"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert f"is for torch {TORCHES[0]} to {TORCHES[-1]}, and torch 2.9.1 was found" in said


@pytest.mark.long
@pytest.mark.slow
def test_wheel_builds_from_the_sdist(archive: Path, tmp_path: Path) -> None:
    """With the torch that is installed."""
    faulthandler.cancel_dump_traceback_later()  # its bound is the command's bound
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"),
            *("--wheel-dir", str(tmp_path), str(archive)),
        ],
        capture_output=True,
        text=True,
        timeout=_BUILD_S_MAX,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("penstock-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        modes = {entry.filename: entry.external_attr >> 16 for entry in archive.infolist()}
    for wanted in ("penstock/_pool.", "/_C.", "/libpenstock.so.", "penstock.h"):
        assert any(wanted in name for name in modes)
    assert [name for name in modes if "simulat" in name or name.endswith(".csv")] == []
    native = native_folder().name
    for program in ("penstock/penstock-server", f"/{native}/penstock-server", "/penstock-worker"):
        (mode,) = (mode for name, mode in modes.items() if name.endswith(program))
        assert mode & stat.S_IXUSR, oct(mode)
