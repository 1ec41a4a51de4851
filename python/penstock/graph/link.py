# SPDX-License-Identifier: Apache-2.0
"""The way of a batch from the workers of a pool to the trainer."""

from __future__ import annotations

from typing import NamedTuple


class Link(NamedTuple):
    """As a loader has measured it."""

    worker_count: int
    bytes_per_s: float  # from all workers together; 0 while it is not known
    sends_whole: bool  # tensors that the trainer does not need cross all the same
