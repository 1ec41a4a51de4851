# SPDX-License-Identifier: Apache-2.0
"""The conda recipe has the version, the Python and the packages of pyproject.toml. It is not built
here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from supported_versions import PYTHONS

import penstock

ROOT = Path(__file__).resolve().parents[2]
# Names that differ in conda.
NAMES = {"torch": "pytorch"}


@pytest.fixture
def recipe() -> dict[str, Any]:
    text = (ROOT / "deploy" / "conda" / "recipe.yaml").read_text("utf-8")
    loaded = yaml.safe_load(text)
    assert isinstance(loaded, dict)
    return loaded


def test_recipe_version_matches_penstock(recipe: dict[str, Any]) -> None:
    assert recipe["context"]["version"] == penstock.__version__
    assert recipe["package"] == {"name": "penstock", "version": "${{ version }}"}


def test_recipe_run_requirements_match_pyproject(recipe: dict[str, Any]) -> None:
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", pyproject, re.MULTILINE | re.DOTALL)
    assert listed is not None
    names = [re.split(r"\W", name)[0] for name in re.findall(r'"(.*?)"', listed[1])]
    run = [name.split()[0] for name in recipe["requirements"]["run"]]
    assert sorted(run) == sorted(["python", *(NAMES.get(name, name) for name in names)])
    assert f"python >={PYTHONS[0]}" in recipe["requirements"]["run"]


def test_recipe_build_requirements_match_cmake(recipe: dict[str, Any]) -> None:
    cmake = (ROOT / "CMakeLists.txt").read_text("utf-8")
    host = " ".join(recipe["requirements"]["host"])
    packages = {
        "ZeroMQ": "zeromq",
        "Sodium": "libsodium",
        "OpenSSL": "openssl",
        "Libdeflate": "libdeflate",
    }
    for found, package in packages.items():
        version = re.search(rf"find_package\({found} ([\d.]+)", cmake)
        assert version is not None
        assert re.search(rf"\b{package} >={re.escape(version[1].removesuffix('.0'))}", host)
    assert re.search(r"setuptools >=77,<82", host)
    assert "cmake >=3.22" in recipe["requirements"]["build"]


def test_recipe_source_is_this_repository(recipe: dict[str, Any]) -> None:
    assert (ROOT / "deploy" / "conda" / recipe["source"]["path"]).resolve() == ROOT
    assert (ROOT / recipe["about"]["license_file"]).is_file()
