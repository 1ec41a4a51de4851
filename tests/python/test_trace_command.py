# SPDX-License-Identifier: Apache-2.0
"""penstock trace, penstock merge-traces: an unmodified program leaves a trace of its steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from chrome_trace import checked, on_track, track_names

pytestmark = pytest.mark.slow

PENSTOCK = [sys.executable, "-m", "penstock"]
SECONDS_MAX = 120.0
PROGRAM = """
    import sys, time
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        def __len__(self):
            return 400

        def __getitem__(self, index):
            time.sleep(0.001)
            return torch.zeros(10)

    def main(step_count):
        for step, batch in enumerate(DataLoader(Rows(), batch_size=4, num_workers=2), 1):
            if step == step_count:
                break
            print(step, flush=True)

    if __name__ == "__main__":
        main(int(sys.argv[1]))
        AT_END
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(at_end: str = "pass") -> None:
    Path("train.py").write_text(textwrap.dedent(PROGRAM).replace("AT_END", at_end))


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PENSTOCK, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        env={**os.environ, **variables},
    )


def call_names(path: str) -> list[str]:
    events = on_track(checked(Path(path)), "trainer")
    return [event["name"] for event in events if event["name"].startswith("batch ")]


@pytest.mark.long
def test_trace_command_traces_unmodified_program() -> None:
    write()
    done = run("trace", "--skip", "3", "--steps", "10", "train.py", "30")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "29"
    assert "penstock trace: 10 steps in " in done.stderr and "ui.perfetto.dev" in done.stderr
    assert call_names("trace.json") == [f"batch {number}" for number in range(3, 13)]
    assert {"worker 0", "worker 1"} <= set(track_names(checked(Path("trace.json"))).values())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("at_end", "code", "words"),
    [
        ("raise ValueError('lost')", 1, "ValueError: lost"),
        ("sys.exit(7)", 7, "penstock trace: 6 steps"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2, "KeyboardInterrupt"),
    ],
)
def test_failing_program_leaves_trace_and_exit_code(at_end: str, code: int, words: str) -> None:
    write(at_end)
    done = run("trace", "-o", "out.json.gz", "train.py", "6")
    assert done.returncode in (code, 130 if code == -2 else code), done.stderr
    assert words in done.stderr
    assert "observing" not in done.stderr  # the traceback is the program's
    assert len(call_names("out.json.gz")) == 6


@pytest.mark.long
def test_ctrl_c_leaves_a_trace() -> None:
    write()
    program = subprocess.Popen(
        [*PENSTOCK, "trace", "train.py", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    for line in program.stdout:
        if line.strip() == "5":
            program.send_signal(signal.SIGINT)
            break
    _, errors = program.communicate(timeout=SECONDS_MAX)
    assert program.returncode != 0
    assert "penstock trace: " in errors, errors
    assert len(call_names("trace.json")) >= 5


@pytest.mark.long
def test_program_without_batches_reports_no_steps() -> None:
    Path("train.py").write_text("print('nothing')")
    done = run("trace", "train.py")
    assert done.returncode == 0
    assert "has no steps" in done.stderr
    checked(Path("trace.json"))


def test_traces_of_ranks_can_be_merged() -> None:
    write()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--standalone", "-m", "penstock", "trace", "--steps", "8", "train.py", "20"],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 0, done.stderr
    merged = run("merge-traces", "-o", "job.json.gz", "trace.rank0.json", "trace.rank1.json")
    assert merged.returncode == 0 and "from 2 traces" in merged.stdout, merged.stderr
    events = checked(Path("job.json.gz"))
    assert len({event["pid"] for event in events}) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--steps", "0", "train.py"), "--steps must be an integer from 1 to 1000000, got '0'"),
        (("-o", "no/trace.json", "train.py"), "no does not exist; create it"),
        (("-o", ".", "train.py"), "is a folder"),
        (("--step", "3", "train.py"), "did you mean --steps?"),
        ((), "missing program; name a file"),
        (("missing.py",), "can't open file"),
    ],
)
def test_wrong_trace_arguments_write_nothing(arguments: tuple[str, ...], words: str) -> None:
    write()
    done = run("trace", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert os.listdir() == ["train.py"]


def test_merging_a_non_trace_is_an_error() -> None:
    Path("x.json").write_text("{}")
    done = run("merge-traces", "-o", "y.json", "x.json")
    assert done.returncode == 1
    assert "penstock merge-traces: x.json has no list of traceEvents" in done.stderr
    assert "-o/--output is missing" in run("merge-traces", "x.json").stderr
