# SPDX-License-Identifier: Apache-2.0
"""penstock keys, controller, status and drain, on loopback: a controller is a separate process, the
other commands run here, since most of their time is the import of torch."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.command_line import main

pytestmark = pytest.mark.slow

SECONDS_MAX = 60.0


class Pool:
    """Commands of one user, whose home and runtime folder are the test's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        for name in ("PENSTOCK_POOL", "PENSTOCK_KEYS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        monkeypatch.chdir(folder)
        self.controllers: list[subprocess.Popen[str]] = []

    def run(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        self._monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main()
        return code, out.getvalue(), err.getvalue()

    def start_controller(self, *arguments: str, bind: str = "tcp://127.0.0.1:0") -> str:
        """Returns the address at which it listens."""
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "controller", "--bind", bind, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.controllers.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "listens at tcp://" in line, line + process.stdout.read()
        return line.split("listens at ")[1].split(",")[0]

    def close(self) -> None:
        for process in self.controllers:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    opened = Pool(tmp_path, monkeypatch)
    yield opened
    opened.close()


def test_loopback_controller_needs_no_keys_and_ends_on_sigterm(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = pool.start_controller()
    code, out, err = pool.run("status", "--controller", endpoint)
    assert (code, err) == (0, "")
    assert endpoint in out
    assert "no workers" in out
    assert "no jobs" in out
    monkeypatch.setenv("PENSTOCK_POOL", endpoint)
    code, out, err = pool.run("status", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["controller"]["endpoint"] == endpoint
    keys = pool.folder / "run" / "penstock"
    assert keys.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in keys.iterdir()} == {0o600}
    process = pool.controllers[0]
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS_MAX) == 0


def test_controller_with_keys_serves_only_their_operator(pool: Pool) -> None:
    for folder in ("keys", "others"):
        code, out, _ = pool.run("keys", folder)
        assert code == 0
        assert folder in out
    endpoint = pool.start_controller("--keys", "keys")
    code, out, _ = pool.run("status", "--controller", endpoint, "--keys", "keys")
    assert code == 0
    for options in (["--keys", "others"], []):  # other keys, or this user's shared ones
        code, out, err = pool.run("status", "--controller", endpoint, *options)
        assert (code, out) == (1, "")
        assert endpoint in err
        assert "key" in err
    code, _, err = pool.run("keys", "keys")
    assert code == 1
    assert "keys" in err
    (pool.folder / "keys" / "operator.secret").chmod(0o644)
    code, _, err = pool.run("status", "--controller", endpoint, "--keys", "keys")
    assert code == 1
    assert "operator.secret" in err


def test_keys_command_makes_and_rotates_keys(pool: Pool) -> None:
    folder = pool.folder / "keys"
    assert pool.run("keys", "keys")[0] == 0
    for what, name in (("user", "ann"), ("machine", "beta")):
        code, out, err = pool.run("keys", "keys", f"--{what}", name, "--out", f"of-{name}")
        assert (code, err) == (0, "")
        assert f"of-{name} contains the keys" in out
        assert f"keys/{name}.{what}.public" in out
        assert (folder / f"{name}.{what}.public").exists()
    assert (pool.folder / "of-beta" / "worker.secret").exists()
    code, _, err = pool.run("keys", "keys", "--finish")
    assert code == 1
    assert "there is no rotation to finish in keys" in err
    code, out, err = pool.run("keys", "keys", "--rotate")
    assert (code, err) == (0, "")
    assert "copy the .former.public files to all key folders" in out
    assert len([*folder.glob("*.former.public")]) == 4
    code, _, err = pool.run("keys", "keys", "--rotate")
    assert code == 1
    assert "run penstock keys keys --finish" in err
    assert pool.run("keys", "keys", "--finish")[0] == 0
    assert [*folder.glob("*.former.public")] == []


def test_non_loopback_address_needs_keys(pool: Pool) -> None:
    code, out, err = pool.run("controller", "--bind", "tcp://0.0.0.0:0")
    assert (code, out) == (1, "")
    assert "penstock keys" in err
    pool.run("keys", "keys")
    endpoint = pool.start_controller("--keys", "keys", bind="tcp://0.0.0.0:0")
    port = endpoint.rpartition(":")[2]
    code, _, err = pool.run("status", "--controller", f"tcp://127.0.0.1:{port}", "--keys", "keys")
    assert (code, err) == (0, "")


def test_wrong_arguments_give_error_and_exit_code(pool: Pool) -> None:
    code, _, err = pool.run("status", "--controller", "tcp://127.0.0.1:9", "--timeout", "0.5")
    assert code == 1
    assert "no controller answered at tcp://127.0.0.1:9" in err
    endpoint = pool.start_controller()
    for arguments, code, words in [
        (
            ["drain", "abc", "--controller", endpoint],
            1,
            "no worker has the name or id prefix 'abc'",
        ),
        (["status"], 2, "PENSTOCK_POOL"),
        (
            ["status", "--controller", endpoint, "--timeout", "-1"],
            2,
            "--timeout must be a number of seconds >= 0.001",
        ),
        (["status", "--controller", "ftp://a"], 1, "tcp://"),
        (["controller"], 2, "--bind"),
        (["controller", "--bind", endpoint], 1, endpoint),
        (["keys"], 2, "DIR is missing"),
        (["keys", "a", "--user", "b"], 2, "--user NAME requires --out FOLDER"),
        (["keys", "a", "--machine", "b"], 2, "--machine NAME requires --out FOLDER"),
        (["keys", "a", "--out", "b"], 2, "--out FOLDER requires --user NAME or --machine NAME"),
        (["keys", "a", "--rotate", "--finish"], 2, "--finish not allowed with argument --rotate"),
        (["keys", "a", "--rotate"], 1, "create keys with penstock keys, or correct the path"),
    ]:
        found, _, err = pool.run(*arguments)
        assert (found, words in err) == (code, True), (arguments, found, err)


def test_operator_reconnects_when_its_connection_is_closed(pool: Pool) -> None:
    """A controller with too many connections closes some, and one of them may be the operator's."""
    accepted = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_all() -> None:
            nonlocal accepted
            with contextlib.suppress(OSError):  # it was shut down
                while True:
                    listener.accept()[0].close()
                    accepted += 1

        closing = threading.Thread(target=close_all)
        closing.start()
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        code, _, err = pool.run("status", "--controller", endpoint, "--timeout", "60")
        listener.shutdown(socket.SHUT_RDWR)
        closing.join()
    assert code == 1
    assert "because too many clients" in err
    assert accepted >= 3


def test_broken_output_pipe_prints_no_error(pool: Pool) -> None:
    """`penstock top --once | head` printed "[Errno 32] Broken pipe"."""
    endpoint = pool.start_controller()
    for command in (["top", "--once"], ["top", "--once", "--json"], ["status"], ["costs"]):
        reader, writer = os.pipe()
        os.close(reader)
        ended = subprocess.run(
            [sys.executable, "-m", "penstock", *command, "--controller", endpoint],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS_MAX,
        )
        os.close(writer)
        assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, ""), command
