# SPDX-License-Identifier: Apache-2.0
"""The list of examples is complete, and its commands run, for the examples that are not tested
elsewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# Parts of other examples.
PARTS = {"options.py", "photograph_crops.py", "report.py", "screen.py", "speed_picture.py"}
PARTS |= {"ranks/task.py"}
SECONDS_MAX = 240
_LOOPBACK = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
_TORCHRUN = ["-m", "torch.distributed.run"]

LISTED: dict[str, str] = dict(
    re.findall(
        r"^\| \[([\w/.]+)\]\(\1\) \| .* \| `([^`]*)`[^|]* \|$",
        (EXAMPLES / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
)
# The output of each; the losses depend on the machine.
_PLAN = r"[1-9] of \d+ calls run in the workers"
_ACCURACY = r"accuracy (?:1\.00|0\.9\d)\n"
OUTPUTS = {
    "validation.py": rf"(?s)epoch 2: .*{_ACCURACY}training: {_PLAN}.*validation: {_PLAN}",
    "lightning_training.py": rf"{_ACCURACY}training: {_PLAN}",
    "trainer.py": r"(?s)loss 0\.\d+\npenstock's loader: True\n",
    "torchrun.py": r"(?m)^rank [01]: loss 0\.\d+, penstock\.drop_in$",
    "ddp_pool.py": r"(?m)^rank [01]: loss 0\.\d+, from a pool$",
}  # fmt: skip
RANKS = {"torchrun.py": 2, "ddp_pool.py": 2}


def test_every_example_is_in_the_list_with_a_command() -> None:
    programs = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("*.py")}
    programs |= {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("ranks/*.py")}
    programs |= {
        path.parent.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("cpp/*/*.txt")
    }
    assert set(LISTED) == programs - PARTS
    named = [word for command in LISTED.values() for word in command.split() if ".py" in word]
    assert len(named) > 10 and all((ROOT / word).is_file() for word in named)


@pytest.mark.parametrize("name", OUTPUTS)
def test_example_is_complete_and_short(name: str) -> None:
    lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert re.fullmatch(r'""".*\.', lines[1]), "it starts with a sentence on what it shows"
    assert LISTED[name] in lines, "it says how it is run"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", OUTPUTS)
def test_listed_command_runs_the_example(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
    }
    for variable in ("PENSTOCK_POOL", "PENSTOCK_KEYS", "LOCAL_RANK", "WORLD_SIZE"):
        environment.pop(variable, None)
    done = subprocess.run(
        runnable(LISTED[name]),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(OUTPUTS[name], done.stdout)) == RANKS.get(name, 1), done.stdout


def runnable(command: str) -> list[str]:
    """With this Python, and with ranks that meet on loopback."""
    program, *arguments = shlex.split(command)
    given = {"python": [], "penstock": ["-m", "penstock"], "torchrun": _TORCHRUN}[program]
    words = [sys.executable, *given, *arguments]
    if "torch.distributed.run" in words:
        place = words.index("torch.distributed.run") + 1
        words[place:place] = _LOOPBACK
    return words
