# SPDX-License-Identifier: Apache-2.0
"""The command penstock, called rightly and wrongly. A typo printed the usage of all commands,
without a suggestion; `run --help` and `explain --help` printed it too.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock
from penstock.cli.command_line import main

Outcome = tuple[int, str, str]
Call = Callable[..., Outcome]

COMMANDS = (
    "run", "explain", "trace", "merge-traces", "doctor", "visits", "keys", "controller", "worker",
    "up", "down", "status", "top", "costs", "drain", "simulate", "env", "guide",
)  # fmt: skip
POOL = ["--controller", "tcp://127.0.0.1:9"]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Call]:
    """Calls the command in this process, in a folder that contains a program."""
    (tmp_path / "train.py").write_text("raise AssertionError('it is not to run')")
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())  # the folder of a program
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for name in ("PENSTOCK_POOL", "PENSTOCK_KEYS"):
        monkeypatch.delenv(name, raising=False)

    def call_command(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
        return (main(), *capfd.readouterr())

    yield call_command
    penstock.uninstall()


@pytest.mark.parametrize(
    ("arguments", "where", "what"),
    [
        ([], "", f"missing command; available commands: {', '.join(COMMANDS)}"),
        (["statsu"], "", "there is no command statsu; did you mean status?"),
        (["wlak"], "", f"there is no command wlak; available commands: {', '.join(COMMANDS)}"),
        (["train.py"], "", "there is no command train.py; did you mean penstock run train.py?"),
        (["--verison"], "", "there is no option --verison; did you mean --version?"),
        (["run"], "run", "missing program; name a file, or a module with -m"),
        (["run", "-m"], "run", "-m requires a module name"),
        (
            ["run", "--fast", "train.py"],
            "run",
            "there is no option --fast; options of the program follow its name",
        ),
        (
            ["run", "--pool-local", "four", "train.py"],
            "run",
            "--pool-local must be an integer from 1 to 1024, got 'four'",
        ),
        (
            ["run", "--pool-local=0", "train.py"],
            "run",
            "--pool-local must be an integer from 1 to 1024, got '0'",
        ),
        (
            ["run", "--pool-local", "train.py"],
            "run",
            "--pool-local must be an integer from 1 to 1024, got 'train.py'",
        ),
        (["explain"], "explain", "missing program; name a file, or a module with -m"),
        (
            ["explain", "--cut", "auto"],
            "explain",
            "missing program; name a file, or a module with -m",
        ),
        (
            ["explain", "--cut", "maximum", "train.py"],
            "explain",
            "--cut must be auto, maximal or none, got 'maximum'; did you mean maximal?",
        ),
        (
            ["explain", "--format=xml", "train.py"],
            "explain",
            "--format must be text, json or dot, got 'xml'",
        ),
        (
            ["explain", "--html", "none/plan.html", "train.py"],
            "explain",
            "--html 'none/plan.html' cannot be written, because the folder '{folder}/none' does "
            "not exist; name a file in a writable folder",
        ),
        (
            ["explain", "--svg", ".", "train.py"],
            "explain",
            "--svg '.' is a folder; name a file in a writable folder",
        ),
        (
            ["explain", "--verbose", "--format", "dot", "train.py"],
            "explain",
            "--verbose applies to the format text; dot always has every call",
        ),
        (["explain", "--format"], "explain", "--format FORMAT requires a value"),
        (
            ["explain", "--fromat", "json", "train.py"],
            "explain",
            "there is no option --fromat; did you mean --format?",
        ),
        (["keys"], "keys", "DIR is missing"),
        (["keys", "a", "b"], "keys", "unexpected argument 'b'"),
        (["controller"], "controller", "--bind tcp://HOST:PORT is missing"),
        # A mistyped argument is reported before a missing one.
        (
            ["controller", "--bnd", "tcp://*:0"],
            "controller",
            "there is no option --bnd; did you mean --bind?",
        ),
        (
            ["worker", *POOL, "--proceses", "2"],
            "worker",
            "there is no option --proceses; did you mean --processes?",
        ),
        (
            ["worker", *POOL, "--processes", "many"],
            "worker",
            "--processes must be an integer from 1 to 1024, got 'many'",
        ),
        (
            ["worker", *POOL, "--processes", "0"],
            "worker",
            "--processes must be an integer from 1 to 1024, got '0'",
        ),
        (
            ["worker", *POOL, "--patience", "0.5"],
            "worker",
            "--patience must be a number of seconds >= 1, got '0.5'",
        ),
        (["status", *POOL, "--jsn"], "status", "there is no option --jsn; did you mean --json?"),
        (["status", *POOL, "-j"], "status", "there is no option -j"),
        (
            ["status", *POOL, "--timeout", "-1"],
            "status",
            "--timeout must be a number of seconds >= 0.001, got '-1'",
        ),
        (
            ["status"],
            "status",
            "the address of the controller is missing; pass --controller tcp://HOST:PORT, or set "
            "PENSTOCK_POOL",
        ),
        (["drain", *POOL], "drain", "WORKER is missing"),
    ],
)
def test_wrong_call_prints_an_error_and_a_help_hint(
    call: Call, tmp_path: Path, arguments: list[str], where: str, what: str
) -> None:
    name = f"penstock {where}".strip()
    what = what.replace("{folder}", str(tmp_path))
    told = f"{name}: {what}\n`{name} --help` tells how it is called.\n"
    assert call(*arguments) == (2, "", told)


def test_local_pool_is_rejected_if_penstock_pool_is_set(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_POOL", "tcp://alpha:7000")
    code, out, error = call("run", "--pool-local", "2", "train.py")
    assert (code, out) == (2, "")
    assert error.startswith(
        "penstock run: --pool-local starts a separate pool, but PENSTOCK_POOL names the pool at "
        "tcp://alpha:7000; unset PENSTOCK_POOL, or leave --pool-local out\n"
    )


def test_svg_without_graphviz_is_rejected_before_the_program_runs(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, error = call("explain", "--svg", "plan.svg", "missing.py")
    assert (code, out) == (2, "")
    assert error.startswith(
        "penstock explain: --svg: an SVG file of a plan needs the command dot of Graphviz, which "
        "is not on the PATH; install Graphviz, or write the picture as HTML: --html FILE\n"
    )


def test_local_pool_is_rejected_within_a_rank(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, error = call("run", "--pool-local", "2", "train.py")
    assert (code, out) == (2, "")
    assert "would start a pool for each rank (this one has LOCAL_RANK=1)" in error
    assert "penstock run --pool-local 2 -m torch.distributed.run" in error


def test_more_workers_than_cpus_cause_a_warning(call: Call) -> None:
    """Before the missing program is looked for."""
    code, _, error = call("run", "--pool-local", "1024", "missing.py")
    assert code == 2
    warning, missing = error.splitlines()
    assert re.match(
        r"penstock run: --pool-local 1024 starts more worker processes than the \d+ CPUs", warning
    )
    assert "missing.py" in missing


@pytest.mark.parametrize("command", ["run", pytest.param("explain", marks=pytest.mark.slow)])
def test_missing_program_suggests_a_similar_file(call: Call, tmp_path: Path, command: str) -> None:
    missing = "can't open file '{}': [Errno 2] No such file or directory"
    path = tmp_path / "tain.py"
    told = f"penstock: {missing.format(path)}; did you mean train.py?\n"
    assert call(command, "tain.py") == (2, "", told)
    assert call(command, str(path)) == (2, "", told)
    told = f"penstock: {missing.format(tmp_path / 'evaluate.py')}\n"
    assert call(command, "evaluate.py") == (2, "", told)


def test_version_is_printed(call: Call) -> None:
    assert call("--version") == (0, f"penstock {penstock.__version__}\n", "")


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_every_command(call: Call, option: str) -> None:
    code, out, error = call(option)
    assert (code, error) == (0, "")
    assert all(f"\n  {command} " in out for command in COMMANDS)


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_own_help(call: Call, command: str, option: str) -> None:
    code, out, error = call(command, option)
    assert (code, error) == (0, "")
    assert out.startswith(f"usage: penstock {command}")
    others = [other for other in COMMANDS if other != command]
    assert not any(f"usage: penstock {other}" in out for other in others)
    assert max(map(len, out.splitlines())) <= 100


def test_help_describes_options_and_defaults(call: Call) -> None:
    """It printed "--processes N of them on this host (1)"."""
    _, out, _ = call("worker", "--help")
    said = "number of workers to start on this host (default: 1)"
    assert f"  --processes N             {said}\n" in out
    assert "(default: 60)" in out


def test_help_after_the_program_is_passed_to_the_program(call: Call, tmp_path: Path) -> None:
    """The missing file is the program to run."""
    assert call("run", "missing.py", "--help")[0] == 2
    assert call("explain", "-m", "missing", "--help")[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["guide"]])
def test_closed_stdout_ends_a_command_silently(arguments: list[str]) -> None:
    """`penstock top --once | head` ended with "penstock top: [Errno 32] Broken pipe"."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "penstock", *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")
