# SPDX-License-Identifier: Apache-2.0
"""A type checker sees penstock's types in a program of the user's: the package has py.typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

pytest.importorskip("mypy")
pytestmark = pytest.mark.slow

# Kept, since mypy reads torch for 15 s where it has no cache.
CACHE = Path(__file__).resolve().parents[2] / "build" / "mypy"


@pytest.mark.long
def test_a_wrong_argument_is_found_by_mypy(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import penstock\n"
        "import torch\n"
        "data = torch.utils.data.TensorDataset(torch.zeros(3))\n"
        "penstock.DataLoader(data, fetch_threads='two')\n"
        "reveal_type(penstock.DataLoader(data).stats().waits)\n"
    )
    package = Path(penstock.__file__).parent
    assert (package / "py.typed").exists()
    environment = dict(os.environ)
    if "site-packages" not in package.parts:  # where mypy finds what is installed
        environment["MYPYPATH"] = str(package.parent)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(CACHE), str(program)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env=environment,
    )
    assert 'Argument "fetch_threads"' in done.stdout, done.stdout + done.stderr
    assert re.search(r'Revealed type is "(builtins\.)?int"', done.stdout), done.stdout
    assert "Found 1 error in" in done.stdout, done.stdout
