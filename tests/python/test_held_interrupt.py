# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a worker is forked: the trainer is interrupted, and no child is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.worker.worker_start import DeferredInterrupt, release_in_child

PROGRAM = """
import os, signal, sys, time
import torch
from penstock import DataLoader

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def children():
    return open(f"/proc/self/task/{os.getpid()}/children").read().split()

if __name__ == "__main__":
    where, pool = sys.argv[1], sys.argv[2] or None
    if where in ("trainer", "both"):
        os.register_at_fork(after_in_parent=interrupt)
    if where in ("worker", "both"):
        os.register_at_fork(after_in_child=interrupt)
    seeding = {"seeding": "batch"} if pool else {}
    try:
        loader = DataLoader(
            torch.arange(8), num_workers=2, multiprocessing_context="fork", pool=pool, **seeding
        )
        for batch in loader:
            pass
        print("delivered all")
    except KeyboardInterrupt:
        print("interrupted")
    except Exception as error:
        print(type(error).__name__)
    loader = None
    deadline = time.monotonic() + 20
    while children() and time.monotonic() < deadline:
        time.sleep(0.05)  # nothing tells when a child that nobody knows has ended
    print(children())
"""
NOBODY = "tcp://127.0.0.1:9"  # the pool is not needed to test the start of its trainer's workers


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("pool", ["", NOBODY])
@pytest.mark.parametrize(
    ("where", "outcome"),
    [
        ("trainer", {"interrupted"}),
        ("both", {"interrupted"}),
        ("worker", {"RuntimeError", "PenstockError"}),  # the workers are gone
    ],
)
def test_interrupt_during_a_fork_is_not_lost(
    pool: str, where: str, outcome: set[str], tmp_path: Path
) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(path), where, pool],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},  # where shared keys are kept
    )
    said, left = done.stdout.splitlines()
    assert (said in outcome, left) == (True, "[]"), done


def test_held_interrupt_is_delivered_at_the_end() -> None:
    seen: list[str] = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("handled"))
    try:
        with DeferredInterrupt():
            os.kill(os.getpid(), signal.SIGINT)
            seen.append("held")
        assert seen == ["held", "handled"]
        os.kill(os.getpid(), signal.SIGINT)
        assert seen == ["held", "handled", "handled"]
    finally:
        signal.signal(signal.SIGINT, before)


def test_release_in_child_delivers_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        os.kill(os.getpid(), signal.SIGINT)
        release_in_child()
        pytest.fail("the interrupt was dropped")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_non_python_handlers_are_left_unchanged(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with DeferredInterrupt():
            assert signal.getsignal(signal.SIGINT) == handler
        assert signal.getsignal(signal.SIGINT) == handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_keep_the_signal_handler() -> None:
    def enter() -> None:
        with DeferredInterrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    seen: list[object] = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
