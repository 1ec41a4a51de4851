# SPDX-License-Identifier: Apache-2.0
"""Spin searches every run of the delivery model, and finds the faults of its mutants."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

MODEL = Path(__file__).resolve().parent / "delivery.pml"
MEMORY_MB_MAX = 2048
DEPTH_MAX = 1_000_000
SECONDS_MAX = 100

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("spin") is None or shutil.which("gcc") is None,
        reason="needs spin and gcc; try: apt-get install spin gcc",
    ),
]


@dataclass(frozen=True, slots=True)
class Search:
    state_count: int
    error: str  # pan's message about the first one, or an empty string


def search(
    folder: Path, definitions: list[str], *, to_the_end: bool = True, liveness: bool = False
) -> Search:
    """Builds the model's search program with these definitions, and runs it to its end."""
    switches = [f"-D{definition}" for definition in definitions]
    run(["spin", *switches, "-a", str(MODEL)], folder)
    # A mutant is found soon; a search to the end is worth the compiler's time.
    kind = ["-O2"] if to_the_end else ["-O0"]
    kind += [] if liveness else ["-DSAFETY", "-DNOCLAIM"]
    limits = [f"-DMEMLIM={MEMORY_MB_MAX}", "-DCOLLAPSE", "-w"]
    run(["gcc", *kind, *limits, "-o", "pan", "pan.c"], folder)
    said = run([str(folder / "pan"), f"-m{DEPTH_MAX}", *(["-a"] if liveness else [])], folder)
    error = re.search(r"^pan:\d+: (.*?)(?: \(at depth \d+\))?$", said, re.MULTILINE)
    states = re.search(r"^\s*(\d+) states, stored", said, re.MULTILINE)
    count = re.search(r"errors: (\d+)", said)
    assert states and count, said
    assert bool(error) == (count.group(1) != "0"), said
    assert error or "Search not completed" not in said, said
    return Search(int(states.group(1)), error.group(1) if error else "")


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


# So that one process more may die over a batch than its trainer would request.
DEADLY = ["DEATHS=3", "DEATHS_MAX=2", "CRASHES=0", "SILENCES=0", "HEDGES=0"]
# The property of each search; README.md gives the reasons for these bounds.
BOUNDS = {
    "one crash and one silence": [],
    "a worker is fenced": ["CRASHES=0", "FORGETS=1"],
    "a worker is cut off and a message lost": ["CRASHES=0", "FORGETS=1", "LOSSES=1"],
    "a batch is recalled and its worker crashes": ["RECALLS=1", "SILENCES=0"],
    "a batch is recalled from a worker that is fenced": ["RECALLS=1", "CRASHES=0", "FORGETS=1"],
    "three batches, credit of two": ["BATCHES=3", "CREDIT=2", "CRASHES=1", "SILENCES=0"],
    "processes of jobs die": ["DEATHS=4", "CRASHES=0", "SILENCES=0"],
    "processes of jobs die and a worker crashes": ["DEATHS=3", "SILENCES=0", "HEDGES=0"],
    "processes of jobs die and the trainer ends a link": ["DEATHS=4", "CRASHES=0", "HEDGES=0"],
    "processes of jobs die and a message is lost": [*DEADLY, "LOSSES=1", "CREDIT=2"],
}


@pytest.mark.long(
    "a worker is cut off and a message lost",
    "a batch is recalled and its worker crashes",
    "a batch is recalled from a worker that is fenced",
    "one crash and one silence",
    "three batches, credit of two",
    "a worker is fenced",
    "processes of jobs die and *",
)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_every_run_is_safe_and_delivers_all_batches(tmp_path: Path, bounds: str) -> None:
    found = search(tmp_path, BOUNDS[bounds])
    assert found.error == ""
    assert found.state_count > 10_000, "the model has lost its choices"


@pytest.mark.long
def test_no_run_loops_without_delivering(tmp_path: Path) -> None:
    assert search(tmp_path, [], liveness=True).error == ""


STUCK = "invalid end state"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("mutant", "bounds", "error"),
    [
        ("NO_DEDUPLICATION", [], "entered"),
        ("HEDGE_IS_ACCEPTED_TWICE", [], "entered"),
        ("TRAINER_TAKES_ANY_LINK", ["LINKS=99"], "link"),  # it opens connections without end
        ("WORKER_TAKES_ANY_LINK", ["LINKS=99"], STUCK),
        ("NO_GAP_CHECK", ["LOSSES=1", "CRASHES=0"], "queued"),
        ("CREDIT_LEAK", ["BATCHES=3"], "queued"),
        ("OLD_WORK_IS_KEPT", [], "queued"),
        ("ACK_BEFORE_BUFFERED", [], "entered"),
        ("LOST_IS_NOT_ASKED_AGAIN", ["HEDGES=0"], STUCK),
        ("ORDER_OF_ARRIVAL", [], "delivered"),
        ("DEATH_IS_NOT_COUNTED", DEADLY, "processes_lost"),
        ("DEATH_COUNTS_FOR_ALL", [*DEADLY, "CREDIT=2"], "processes_lost"),
        ("DEATH_BEHIND_A_GAP_IS_LOST", [*DEADLY, "CREDIT=2", "LOSSES=1"], "processes_lost"),
    ],
)
def test_mutant_is_detected(tmp_path: Path, mutant: str, bounds: list[str], error: str) -> None:
    found = search(tmp_path, [mutant, *bounds], to_the_end=False)
    assert found.error, f"nothing was found in {found.state_count} states"
    assert error in found.error
