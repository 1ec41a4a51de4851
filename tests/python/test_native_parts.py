# SPDX-License-Identifier: Apache-2.0
"""The native part for the installed torch is chosen, and a mismatch is rejected with an
explanation: another torch, another Python, another C library, a tree that was not built, two
penstocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch
from native_build import native_folder

import penstock
from penstock import _native
from penstock._native import minor_of, native_parts, refusal, warn_of_others
from penstock._packages_on_path import FoundPackage
from penstock._version import TORCH_MINORS, __version__

PACKAGE = Path(penstock.__file__).parent


def package_with(folder: Path, *minors: str, version: str = __version__) -> Path:
    """A package whose native parts are empty files."""
    package = folder / "penstock"
    for minor in minors:
        part = package / "lib" / f"torch_{minor.replace('.', '_')}"
        part.mkdir(parents=True)
        facts = {"penstock": version, "torch": f"{minor}.1", "cuda": None, "kernels": False}
        (part / "build_info.json").write_text(json.dumps(facts))
        (part / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    return package


def refused(package: Path, torch_version: str, *packages: FoundPackage) -> str | None:
    return refusal(native_parts(package), torch_version, packages, package)


def test_loaded_native_part_matches_installed_torch() -> None:
    minor = minor_of(torch.__version__)
    assert native_folder().name == f"torch_{minor.replace('.', '_')}"
    part = next(part for part in native_parts() if part.torch_minor == minor)
    assert part.penstock == __version__
    assert minor_of(part.torch) == minor


@pytest.mark.parametrize("torch_version", ["2.11.0", "2.13.0+cu130", "2.15.1"])
def test_each_supported_torch_finds_its_native_part(tmp_path: Path, torch_version: str) -> None:
    package = package_with(tmp_path, "2.15", "2.11", "2.13")
    assert refused(package, torch_version) is None
    assert [part.torch_minor for part in native_parts(package)] == ["2.11", "2.13", "2.15"]


def test_unsupported_torch_error_states_supported_range(tmp_path: Path) -> None:
    package = package_with(tmp_path, *TORCH_MINORS)
    for torch_version in ("2.10.2", "2.99.0a0"):
        assert refused(package, torch_version) == (
            f"penstock {__version__} supports torch {TORCH_MINORS[0]} to {TORCH_MINORS[-1]}, got "
            f"torch {torch_version}; install a supported torch (pip install 'torch>=2.11,<2.16'), "
            f"or a penstock that supports torch {minor_of(torch_version)}"
        )


def test_error_names_torch_that_source_build_is_for(tmp_path: Path) -> None:
    said = refused(package_with(tmp_path, "2.11"), "2.13.0") or ""
    assert said.startswith("this penstock was built for torch 2.11, got torch 2.13.0; rebuild")
    assert "install a penstock wheel" in said


def test_mixed_penstock_versions_are_detected(tmp_path: Path) -> None:
    said = refused(package_with(tmp_path, "2.11", version="9.9.9"), "2.11.0") or ""
    assert f"are of penstock {__version__} and its native parts of penstock 9.9.9" in said
    assert "pip uninstall penstock" in said


def test_error_names_native_parts_of_another_python(tmp_path: Path) -> None:
    package = package_with(tmp_path, "2.11")
    module = package / "lib" / "torch_2_11" / f"_C{EXTENSION_SUFFIXES[0]}"
    module.rename(module.with_name("_C.cpython-27-x86_64-linux-gnu.so"))
    said = refused(package, "2.11.0") or ""
    assert (
        "were not built for this Python" in said
        and "found _C.cpython-27-x86_64-linux-gnu.so" in said
    )


def test_unbuilt_tree_error_names_the_built_package(tmp_path: Path) -> None:
    tree = FoundPackage(tmp_path / "tree" / "penstock", __version__, False)
    built = FoundPackage(tmp_path / "site" / "penstock", __version__, True)
    package = package_with(tmp_path)
    assert (refused(package, "2.11.0", tree) or "").endswith(
        "has no native parts; it is a source tree that was not built; install it with "
        "`pip install .`"
    )
    said = refused(package, "2.11.0", tree, built) or ""
    assert f"another penstock, which has them, is in {built.folder}: remove the first one" in said


def test_second_built_version_on_path_warns() -> None:
    used = FoundPackage(PACKAGE, __version__, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_others([used, FoundPackage(Path("/a/penstock"), __version__, True)])
        warn_of_others([used, FoundPackage(Path("/b/penstock"), "0.0.9", False)])
    with pytest.warns(
        RuntimeWarning, match=r"two versions of penstock are on .*/c/penstock \(version 0.0.9\)"
    ):
        warn_of_others([used, FoundPackage(Path("/c/penstock"), "0.0.9", True)])


def python(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(path)},
    )


@pytest.fixture
def source_tree(tmp_path: Path) -> Path:
    """A folder for the path, whose penstock has no native parts."""
    folder = tmp_path / "tree" / "penstock"
    folder.mkdir(parents=True)
    for path in PACKAGE.rglob("*.py"):
        copy = folder / path.relative_to(PACKAGE)
        copy.parent.mkdir(exist_ok=True, parents=True)
        copy.write_bytes(path.read_bytes())
    return folder.parent


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "statement", ["penstock.DataLoader", "from penstock import _C", "from penstock import _pool"]
)
def test_importing_unbuilt_tree_names_the_built_package(source_tree: Path, statement: str) -> None:
    done = python(f"import penstock\n{statement}", source_tree)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"ImportError: the penstock in {source_tree}/penstock has no native parts"
    )
    assert "another penstock, which has them, is in " in last and "PYTHONPATH" in last


@pytest.mark.slow
def test_load_failure_names_built_and_running_torch(source_tree: Path) -> None:
    minor = minor_of(torch.__version__)
    package_with(source_tree, minor)
    done = python("import penstock\npenstock.DataLoader", source_tree)
    last = done.stderr.splitlines()[-1]
    assert "cannot be loaded: " in last and f"built with torch {minor}.1" in last
    assert f"this is torch {torch.__version__} with glibc" in last


@pytest.mark.parametrize("answer", [ValueError("unrecognized"), None], ids=["musl", "none"])
def test_non_glibc_python_is_rejected_before_torch_import(
    monkeypatch: pytest.MonkeyPatch, answer: Exception | None
) -> None:
    def confstr(name: str) -> None:
        if answer is not None:
            raise answer

    monkeypatch.setattr(os, "confstr", confstr)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="require the GNU C library, and this Python runs on an"):
        _native.load("penstock._C")
