# SPDX-License-Identifier: Apache-2.0
"""Builds the package penstock_simulator, with the native module that penstock's CMake project makes
for it. It has the version of penstock and requires exactly that version."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parents[1]
COPIES = ROOT / "build" / "penstock-simulator"


class BuildExtension(build_ext):
    """Has CMake build the module and put it where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parents[1]
        command = [sys.executable, "setup.py", "-q", "native", "--simulator-to", str(target)]
        subprocess.run(command, cwd=ROOT, check=True)


def version() -> str:
    text = (ROOT / "python" / "penstock" / "_version.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)[0]


shutil.rmtree(COPIES, ignore_errors=True)  # setuptools alone would ship files that are long deleted
setup(
    version=version(),
    install_requires=[f"penstock=={version()}"],
    ext_modules=[Extension("penstock_simulator._simulator", sources=[])],
    cmdclass={"build_ext": BuildExtension},
    options={"build": {"build_base": str(COPIES)}},
)
