# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while samples that several threads fetch are blocked."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from script_runs import running

BLOCKED = """
import os, sys, threading
from torch.utils.data import DataLoader

class Blocked:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index >= 4:
            if index == 7:
                os.write(1, b"blocked\\n")  # whole, whatever another process prints
            os.read(reader, 1)
        return index

reader, writer = os.pipe()
iterator = iter(DataLoader(Blocked(), batch_size=4, num_workers={workers}, fetch_threads=4))
"""
FIRST = 'os.write(1, str(next(iterator).tolist()).encode() + b"\\n")\n'


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("to_group", [False, True])
def test_ctrl_c_interrupts_a_loop_waiting_for_blocked_samples(
    workers: int, to_group: bool, tmp_path: Path
) -> None:
    """The program continues, and ends although the samples never do."""
    source = f"""{BLOCKED.format(workers=workers)}
try:  # an interrupt that follows upon its output may find the program still in this line
    {FIRST}
    next(iterator)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    with running("penstock", source, tmp_path) as run:
        assert sorted([run.read_line(), run.read_line()]) == ["[0, 1, 2, 3]", "blocked"]
        (run.signal_group if to_group else run.signal)(signal.SIGINT)
        assert run.read_line() == "interrupted"
        assert run.finish() == (0, "", "")


@pytest.mark.slow
def test_next_batch_waits_for_samples_left_by_an_interrupt(
    tmp_path: Path,
) -> None:
    source = f"""{BLOCKED.format(workers=0)}{FIRST}
order = [4, 5, 6, 7, 0, 1, 2, 3]
iterator = iter(DataLoader(Blocked(), batch_size=4, sampler=order, fetch_threads=4))
try:
    next(iterator)
except KeyboardInterrupt:
    threading.Timer(0.1, os.write, (writer, b"!!!!")).start()
print(next(iterator).tolist(), flush=True)
del iterator
print([t.name for t in threading.enumerate() if t.name.startswith("pk_")], flush=True)
"""
    with running("penstock", source, tmp_path) as run:
        assert run.read_line() == "[0, 1, 2, 3]"
        assert run.read_line() == "blocked"
        run.signal(signal.SIGINT)
        assert run.finish() == (0, "[0, 1, 2, 3]\n[]\n", "")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_uncaught_ctrl_c_ends_a_blocked_program(workers: int, tmp_path: Path) -> None:
    with running(
        "penstock", BLOCKED.format(workers=workers) + FIRST + "next(iterator)", tmp_path
    ) as run:
        assert sorted([run.read_line(), run.read_line()]) == ["[0, 1, 2, 3]", "blocked"]
        run.signal_group(signal.SIGINT)
        code, out, error = run.finish()
        assert (code, out) == (-signal.SIGINT, "")
        assert error.endswith("KeyboardInterrupt\n") and error.count("Traceback") == 1
