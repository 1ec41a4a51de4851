# SPDX-License-Identifier: Apache-2.0
"""The version of penstock and its supported torches and Pythons are the same everywhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from supported_versions import PYTHONS, TORCHES

from penstock import _version
from penstock.compat.require import TESTED_TORCH

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / ".make"))
import requirements  # noqa: E402


def text(*names: str) -> str:
    return ROOT.joinpath(*names).read_text("utf-8")


def test_cpp_header_has_the_version() -> None:
    header = text("csrc", "include", "penstock", "export.h")
    assert f'#define PENSTOCK_VERSION "{_version.__version__}"' in header


def test_changelog_has_a_section_for_the_version() -> None:
    assert f"\n## {_version.__version__}\n" in text("CHANGELOG.md")


def test_build_files_do_not_repeat_the_version() -> None:
    names = ("CMakeLists.txt", "pyproject.toml", "setup.py")
    for name in (*names, "simulator/pyproject.toml", "simulator/setup.py"):
        assert _version.__version__ not in text(name), name


def test_pyproject_requires_the_torch_range() -> None:
    oldest, newest = TORCHES[0], TORCHES[-1]
    after = f"{newest.partition('.')[0]}.{int(newest.partition('.')[2]) + 1}"
    for folder in (".", "simulator"):
        assert f'"torch>={oldest},<{after}"' in text(folder, "pyproject.toml")


def test_torch_range_has_no_gaps() -> None:
    minors = [tuple(map(int, torch.split("."))) for torch in TORCHES]
    assert minors == [(2, minor) for minor in range(minors[0][1], minors[-1][1] + 1)]


def test_pyproject_requires_the_oldest_python() -> None:
    for folder in (".", "simulator"):
        assert f'requires-python = ">={PYTHONS[0]}"' in text(folder, "pyproject.toml")


def test_requirements_are_listed_for_every_torch() -> None:
    assert tuple(requirements.BESIDE) == TORCHES
    for torch, beside in requirements.BESIDE.items():
        assert beside["torch"] == f"=={torch}.*"


def test_development_uses_the_newest_torch() -> None:
    assert f"TORCH ?= {TORCHES[-1]}\n" in text("Makefile")
    assert f"$(filter-out {TORCHES[-1]}," in text("Makefile")
    assert f"ARG TORCH={TORCHES[-1]}\n" in text("deploy", "docker", "Dockerfile")


def test_tested_torches_are_in_the_supported_range() -> None:
    assert set(TESTED_TORCH) <= set(TORCHES)


@pytest.mark.parametrize("torch", TORCHES)
def test_requirements_pin_only_the_selected_torch(
    torch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH", torch)
    monkeypatch.chdir(ROOT)
    listed = requirements.requirements("test")
    assert [one for one in listed if one.startswith("torch=")] == [f"torch=={torch}.*"]
    has_torchaudio = any(one.startswith("torchaudio") for one in listed)
    assert has_torchaudio == (torch == "2.11")
