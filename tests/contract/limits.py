# SPDX-License-Identifier: Apache-2.0
"""The limits around every test of the suites: a deadline, and one thread for torch's operators."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
import torch


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """A test that hangs fails instead of holding up the suite."""

    def give_up(signum: int, frame: FrameType | None) -> None:
        # Not an Exception, which torch's loader would mistake for an empty queue.
        pytest.fail(f"the test took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
