# SPDX-License-Identifier: Apache-2.0
"""Describe a loader's workers for a plan: the link to them and the libraries that they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# The batch tensors that a library takes, by leaf; they have no values.
LibraryLeaves = Sequence[tuple[int, torch.Tensor]]


class Link(NamedTuple):
    """The connection from a pool's workers to the trainer, as measured by a loader."""

    worker_count: int
    bytes_per_s: float  # total of all workers; 0 while unknown
    sends_whole: bool  # tensors that the trainer does not need are sent, too


@dataclass(frozen=True)
class Library:
    """A prefix as a shared library, which a worker may run in place of its executor."""

    code: bytes = b""
    leaves: LibraryLeaves = ()
