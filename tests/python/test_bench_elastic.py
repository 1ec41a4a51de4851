# SPDX-License-Identifier: Apache-2.0
"""The parts of bench/elastic.py that need no pool: a training's rates, and the picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
_PROGRAM = """
import sys
from pathlib import Path
from elastic import Job
from elastic_picture import Curve, draw

job = Job("ready", 1.0)
job.wait()
rate = job.rate(job.at[1], job.at[-1])
assert 1 <= rate <= 20.5, rate
Path(sys.argv[1]).write_text(
    draw(
        10.0, 20.0,
        [Curve("first job", [(0.0, 1.0), (10.0, 20.0)])],
        [Curve("first job", [(0.0, 2.0), (5.0, 4.0)])],
        [(5.0, "a node dies")],
    )
)
"""


@pytest.mark.long
def test_training_rate_and_plot_curves_are_produced(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(picture)],
        cwd=BENCH,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    drawn = ElementTree.parse(picture)
    lines = drawn.findall("{*}polyline")
    assert [line.get("class") for line in lines] == ["line ideal", "line one", "line one"]
    assert len(lines[2].get("points", "").split()) == 3, "workers are steps"
    assert "a node dies" in [text.text for text in drawn.findall("{*}text")]
