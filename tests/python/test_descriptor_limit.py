# SPDX-License-Identifier: Apache-2.0
"""A trainer without a descriptor left waited for workers until its timeout, and never said why."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

import pytest

from penstock.loader.descriptor_limit import check_can_connect


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


def test_a_connection_has_room() -> None:
    check_can_connect()
    with free_descriptors(4):
        check_can_connect()


def test_no_room_for_a_connection_is_said() -> None:
    with free_descriptors(3), pytest.raises(OSError, match="(?s)may have .*ulimit -n"):
        check_can_connect()
