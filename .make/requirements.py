# SPDX-License-Identifier: Apache-2.0
"""Prints the packages that a group of pyproject.toml stands for, one per line.

usage: requirements.py build|demo|frameworks|test|bench|lint

`build` is what a build and penstock itself need; every other group is printed with it, so that pip
resolves them together and never moves torch to another version.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def requirements(group: str) -> list[str]:
    pyproject = tomllib.loads(Path("pyproject.toml").read_text())
    optional = pyproject["project"]["optional-dependencies"]
    found = [*pyproject["build-system"]["requires"], *pyproject["project"]["dependencies"]]

    def add(name: str) -> None:
        for requirement in optional[name]:
            if own := re.fullmatch(r"penstock\[(.*)\]", requirement):
                for part in own.group(1).split(","):
                    add(part)
            else:
                found.append(requirement)

    if group != "build":
        add(group)
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
