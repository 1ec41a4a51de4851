# SPDX-License-Identifier: Apache-2.0
"""A type checker sees penstock's types in a user's program: the package has py.typed."""

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

# Kept, since mypy needs 15 s to read torch without a cache.
CACHE = Path(__file__).resolve().parents[2] / "build" / "mypy"


@pytest.mark.long
def test_mypy_checks_programs_against_penstock_types(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import penstock\n"
        "import torch\n"
        "data = torch.utils.data.TensorDataset(torch.zeros(3))\n"
        "penstock.DataLoader(data, max_skipped='two')\n"
        "reveal_type(penstock.DataLoader(data).stats().waits)\n"
        "reveal_type(penstock.DataLoader(data).plan)\n"
        "with penstock.DataLoader(data) as loader:\n"
        "    reveal_type(loader.state_dict)\n"
        "penstock.offload(torch.nn.Linear(1, 1), 'no loader')\n"
    )
    package = Path(penstock.__file__).parent
    assert (package / "py.typed").exists()
    environment = dict(os.environ)
    if "site-packages" not in package.parts:  # where mypy finds installed packages
        environment["MYPYPATH"] = str(package.parent)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(CACHE), str(program)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env=environment,
    )
    assert 'Argument "max_skipped"' in done.stdout, done.stdout + done.stderr
    assert re.search(r'Revealed type is "(builtins\.)?int"', done.stdout), done.stdout
    assert "penstock.graph.plan.Plan | None" in done.stdout, done.stdout
    assert re.search(r"def \(\) -> (builtins\.)?dict", done.stdout), done.stdout
    assert 'Argument 2 to "offload"' in done.stdout, done.stdout
    assert "Found 2 errors in" in done.stdout, done.stdout
