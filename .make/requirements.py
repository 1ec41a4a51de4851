# SPDX-License-Identifier: Apache-2.0
"""Prints the packages that a group of pyproject.toml stands for, one per line.

usage: requirements.py build|demo|frameworks|test|bench|lint

`build` has the requirements of a build and of penstock itself; every other group is printed with
it, so that pip resolves them together and never moves torch to another version. The environment
variable TORCH selects the minor version of torch (default: the newest).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

# The packages that are installed with each torch. torchaudio ends at 2.11.
BESIDE = {
    "2.11": {"torch": "==2.11.*", "torchvision": "==0.26.*", "torchaudio": "==2.11.*"},
    "2.12": {"torch": "==2.12.*", "torchvision": "==0.27.*", "torchaudio": None},
    "2.13": {"torch": "==2.13.*", "torchvision": "==0.28.*", "torchaudio": None},
    "2.14": {"torch": "==2.14.*", "torchvision": "==0.29.*", "torchaudio": None},
    "2.15": {"torch": "==2.15.*", "torchvision": "==0.29.*", "torchaudio": None},
}


def for_torch(requirement: str) -> str | None:
    """Return the requirement for the wanted torch; None if it has no such package."""
    wanted = os.environ.get("TORCH") or [*BESIDE][-1]
    if wanted not in BESIDE:
        sys.exit(
            f"TORCH must be {' or '.join(BESIDE)}, which penstock is tested with, got {wanted}"
        )
    name = re.match(r"[\w-]+", requirement)[0]
    if name not in BESIDE[wanted]:
        return requirement
    pinned = BESIDE[wanted][name]
    return None if pinned is None else name + pinned


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
    chosen = [for_torch(requirement) for requirement in dict.fromkeys(found)]
    return [requirement for requirement in chosen if requirement is not None]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
