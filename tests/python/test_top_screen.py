# SPDX-License-Identifier: Apache-2.0
"""penstock top on a real terminal, with a real pool."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pool_processes import SECONDS_MAX, PoolProcesses, pool_of
from terminal_program import TerminalProgram

pytestmark = pytest.mark.slow

TOP = [sys.executable, "-m", "penstock", "top"]


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


StartTop = Callable[..., TerminalProgram]


@pytest.fixture
def start_top(pool: PoolProcesses) -> Iterator[StartTop]:
    started: list[TerminalProgram] = []

    def start(*options: str, columns: int = 120, **variables: str) -> TerminalProgram:
        command = [*TOP, "--controller", pool.endpoint, "--interval", "0.2", *options]
        environment = {**pool.environment, "TERM": "linux", "LC_ALL": "C.UTF-8", **variables}
        started.append(TerminalProgram(command, environment, columns=columns))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.mark.long
def test_killed_worker_appears_in_events(pool: PoolProcesses, start_top: StartTop) -> None:
    worker, _ = pool.start_workers(2)
    pool.start_training()
    top = start_top()
    top.wait_for("2: 2 serving")
    text = top.wait_for("Photographs")
    assert "[Jobs]" in text and "BATCH/s" in text
    assert top.style_at("JOB").reverse and top.style_at("penstock top").fg == "cyan"
    top.press("f5")
    text = top.wait_for("└─ worker")
    assert "├─ worker" in text
    name, _, pid = worker.served()[0]
    top.press("back tab")
    top.wait_for("[Events]")
    os.kill(pid, signal.SIGKILL)
    text = top.wait_for("worker died")
    assert f"/{pid} disappeared without draining; it worked for" in text
    assert top.style_at("worker died").reverse or top.style_at("worker died").fg == "red"
    top.wait_for("worker joined")  # its supervisor has started another
    top.press("\t", "\t")
    top.wait_for("[Workers]")
    top.wait_for("2: 2 serving")
    top.press("q")
    assert top.end() == 0 and top.is_as_before()


@pytest.mark.long
def test_top_adapts_to_terminal_resize(pool: PoolProcesses, start_top: StartTop) -> None:
    pool.start_worker()
    top = start_top("--tree")
    top.press("\t")
    top.wait_for("[Workers]")
    for columns, lines in ((50, 8), (20, 4), (3, 2), (1, 1)):
        top.resize(columns, lines)
        top.wait(lambda text: bool(text.strip()))
        top.press("f1", "x", "f3", "o", "escape", "f4", "o", "escape", "f6", "down", "escape")
    top.resize(140, 30)
    top.wait(lambda text: "1 free" in text and "SOFTWARE" in text and "F10Quit" in text)
    top.press("f10")
    assert top.end() == 0 and top.is_as_before()


@pytest.mark.parametrize("how", ["option", "variable"])
def test_no_color_disables_colours(start_top: StartTop, how: str) -> None:
    top = start_top("--no-color") if how == "option" else start_top(NO_COLOR="1")
    top.wait_for("F10Quit")
    assert top.style_at("penstock top").fg == "default"
    assert top.style_at("F1Help").bold
    top.press("q")
    assert top.end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_top_and_restores_the_terminal(
    start_top: StartTop, number: signal.Signals
) -> None:
    top = start_top()
    top.wait_for("F10Quit")
    code = top.end(number)
    assert code == (0 if number == signal.SIGINT else 128 + number)
    assert top.is_as_before()
    assert "Traceback" not in top.text


def test_suspended_top_restores_the_terminal_until_it_continues(pool: PoolProcesses) -> None:
    """Suspended by Ctrl-Z and continued by the shell's fg."""
    command = shlex.join([*TOP, "--controller", pool.endpoint])
    environment = {**pool.environment, "PS1": "prompt> ", "TERM": "linux", "LC_ALL": "C.UTF-8"}
    shell = TerminalProgram(["bash", "--norc", "--noediting", "-i"], environment)
    try:
        shell.wait_for("prompt>")
        shell.press(f"{command}\n")
        shell.wait_for("F10Quit")
        assert not shell.is_as_before()
        shell.press("\x1a")
        shell.wait_for("Stopped")
        shell.wait_for("prompt>")
        assert shell.is_as_before()
        shell.press("clear\n")
        shell.wait(lambda text: "F10Quit" not in text and "prompt>" in text)
        shell.press("fg\n")
        shell.wait_for("F10Quit")
        assert not shell.is_as_before()
        shell.press("q")
        shell.wait_for("prompt>")
        assert shell.is_as_before()
        shell.press("exit\n")
        assert shell.end() == 0
    finally:
        shell.close()


def test_lost_controller_is_reported_until_it_is_back(
    pool: PoolProcesses, start_top: StartTop
) -> None:
    top = start_top("--timeout", "0.5")
    top.wait_for("F10Quit")
    pool.processes[0].end()
    text = top.wait_for("last update")
    assert "no controller answered at" in text and "Jobs" in text
    pool.start_controller(bind=pool.endpoint)
    top.wait(lambda text: "F10Quit" in text and "last update" not in text)
    top.press("q")
    assert top.end() == 0


def run_top(pool: PoolProcesses, *options: str, **variables: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [*TOP, "--controller", pool.endpoint, *options],
        env={**pool.environment, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    return done.returncode, done.stdout, done.stderr


def test_once_prints_one_frame_as_text_or_json(pool: PoolProcesses) -> None:
    pool.start_worker()
    code, out, err = run_top(pool, "--once")
    assert (code, err) == (0, "")
    assert "\nJobs:\nnone\n" in out and "1: 1 free" in out and "\x1b" not in out
    code, out, err = run_top(pool, "--once", "--json")
    assert (code, err) == (0, "")
    fields = json.loads(out)
    assert fields["totals"]["workers_by_state"]["free"] == 1
    assert fields["endpoint"] == pool.endpoint


def test_top_without_terminal_suggests_once(pool: PoolProcesses, start_top: StartTop) -> None:
    code, out, err = run_top(pool)
    assert (code, out) == (1, "")
    assert "needs a terminal" in err and "--once" in err
    top = start_top(TERM="dumb")
    assert top.end() == 1
    assert "cannot move its" in top.text and "--once" in top.text


def test_terminal_without_a_description_shows_top(start_top: StartTop) -> None:
    """As over SSH to a machine that has no terminfo of it."""
    top = start_top(TERM="xterm-new")
    top.wait_for("F10Quit")
    top.press("\x1bOP")  # F1, as xterm sends it
    top.wait_for("press any key to return")
    top.press("escape", "q")
    assert top.end() == 0 and top.is_as_before()


def test_missing_rich_names_the_extra(pool: PoolProcesses, tmp_path: Path) -> None:
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich/__init__.py").write_text("raise ModuleNotFoundError('none', name='rich')")
    path = os.pathsep.join([str(tmp_path), pool.environment.get("PYTHONPATH", "")])
    for options in ([], ["--once"]):
        code, out, err = run_top(pool, *options, PYTHONPATH=path)
        assert (code, out) == (1, "")
        assert "pip install 'penstock[top]'" in err and "Traceback" not in err
    code, out, err = run_top(pool, "--once", "--json", PYTHONPATH=path)
    assert (code, err) == (0, "") and json.loads(out)["jobs"] == []


def test_missing_pool_or_json_without_once_is_an_error(pool: PoolProcesses) -> None:
    code, out, err = run_top(pool, "--json")
    assert code == 2 and "--json requires --once" in err
    assert json.loads(out)["error"] == {"code": "usage", "message": "--json requires --once"}
    pool.processes[0].end()
    code, out, err = run_top(pool, "--once", "--timeout", "0.3")
    assert (code, out) == (1, "")
    assert "no controller answered at" in err
