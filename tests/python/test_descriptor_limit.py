# SPDX-License-Identifier: Apache-2.0
"""A trainer without a descriptor left waited for workers until its timeout, and never reported why.
Processes that serve a pool kept the usual soft limit, even where the system allowed more."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock import _pool
from penstock.cli.environment_command import DESCRIPTOR_LIMIT_LEAST
from penstock.loader.process_limits import check_can_connect


@contextlib.contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]  # beyond every gap
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, before[1]))
    for descriptor in taken[:count]:
        os.close(descriptor)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken[count:]:
            os.close(descriptor)


def test_connection_check_passes_with_enough_descriptors() -> None:
    check_can_connect()
    with free_descriptors(4):
        check_can_connect()


def test_connection_check_fails_with_too_few_descriptors() -> None:
    with (
        free_descriptors(3),
        pytest.raises(OSError, match="(?s)exceeds the limit of .*ulimit -n"),
    ):
        check_can_connect()


def lines_under(soft: int, hard: int) -> list[str]:
    """The output of a process that serves a pool under these limits."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from penstock import _pool\nprint(*_pool.raise_descriptor_limit(), sep='\\n')",
        ],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.split("\n")[:-1]


@pytest.mark.slow
def test_descriptor_limit_is_raised_and_reported() -> None:
    least = DESCRIPTOR_LIMIT_LEAST
    assert least == _pool.DESCRIPTOR_LIMIT_LEAST
    changed, low = lines_under(200, 256)
    assert changed == "can have 256 files open; the previous limit was 200"
    assert low.startswith(f"can have 256 files open, and {least} or more are recommended")
    assert lines_under(256, 256) == [low]
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= least:
        assert lines_under(200, least) == [
            f"can have {least} files open; the previous limit was 200"
        ]
        assert lines_under(least, least) == [""]  # print() without arguments ends a line


@pytest.mark.slow
def test_environment_report_names_a_low_hard_limit() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from penstock.cli.environment_command import limit_facts\n"
            "print(*limit_facts()['limits'](), sep='\\n')",
        ],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    first, *_, last = done.stdout.splitlines()
    assert first == "files: 256"
    assert last.startswith(f"files are too few for a pool's processes: {DESCRIPTOR_LIMIT_LEAST}")
