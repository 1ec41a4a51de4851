# SPDX-License-Identifier: Apache-2.0
"""The workers of a loader as a plan sees them: the link from them and the libraries they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# The tensors of the batch that a library takes, by leaf; they have no values.
LibraryLeaves = Sequence[tuple[int, torch.Tensor]]


class Link(NamedTuple):
    """The way of a batch from the workers of a pool to the trainer, as a loader has measured it."""

    worker_count: int
    bytes_per_s: float  # from all workers together; 0 while it is not known
    sends_whole: bool  # tensors that the trainer does not need cross all the same


@dataclass(frozen=True)
class Library:
    """A prefix as a shared library, which a worker may run in the place of its executor."""

    code: bytes = b""
    leaves: LibraryLeaves = ()
