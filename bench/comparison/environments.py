# SPDX-License-Identifier: Apache-2.0
"""A virtual environment for each system, with pinned versions.

A system that needs torch takes it, with the other packages there, from the environment that runs
the comparison. A system without pinned packages runs in that environment.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

INSTALL_S_MAX = 900


@dataclass(frozen=True, slots=True)
class Requirements:
    """The packages of a system."""

    packages: tuple[str, ...]
    beside_torch: bool = True
    folder: str = ""  # another system's environment

    @property
    def stamp(self) -> str:
        text = repr((self.packages, self.beside_torch, sys.version, sysconfig.get_path("purelib")))
        return hashlib.sha256(text.encode()).hexdigest()


TENSORFLOW = ("tensorflow-cpu==2.21.0", "pillow==13.0.0")
# The compared versions; penstock and torch are the installed ones.
REQUIREMENTS: dict[str, Requirements] = {
    "penstock": Requirements(()),
    "torch": Requirements(()),
    "stateful": Requirements(("torchdata==0.11.0",)),
    "grain": Requirements(("grain==0.2.18", "array-record==0.8.6")),
    "spdl": Requirements(("spdl==0.8.0",)),
    "ray": Requirements(("ray[data]==2.60.0",)),
    "tfdata": Requirements(TENSORFLOW, beside_torch=False),
    "tfservice": Requirements(TENSORFLOW, beside_torch=False, folder="tfdata"),
    "litdata": Requirements(("litdata==0.2.76",)),
    "mosaic": Requirements(("mosaicml-streaming==0.13.0",)),
}


class NotInstalledError(RuntimeError):
    """The environment of a system could not be made; the message has the reason."""


def python_of(name: str, folder: Path, log: Callable[[str], None]) -> Path:
    """Return the interpreter of a system's environment, which is made if it is not ready.

    Raises:
        NotInstalledError: pip could not install the packages.
    """
    wanted = REQUIREMENTS[name]
    if not wanted.packages:
        return Path(sys.executable)
    home = folder.resolve() / (wanted.folder or name)
    python, stamp = home / "bin/python", home / "ready"
    if stamp.exists() and stamp.read_text() == wanted.stamp:
        return python
    log(f"{name}: installing {' '.join(wanted.packages)} into {home}")
    stamp.unlink(missing_ok=True)
    _run([sys.executable, "-m", "venv", "--clear", str(home)])
    if wanted.beside_torch:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        shared = home / "lib" / version / "site-packages" / "beside_torch.pth"
        shared.write_text(sysconfig.get_path("purelib") + "\n")
    _run([str(python), "-m", "pip", "install", "--quiet", *wanted.packages])
    stamp.write_text(wanted.stamp)
    return python


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_S_MAX, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotInstalledError(f"not installed within {INSTALL_S_MAX} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise NotInstalledError(lines[-1] if lines else f"exit status {done.returncode}")
