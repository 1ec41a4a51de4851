# SPDX-License-Identifier: Apache-2.0
"""A prefix as a shared library, which a worker may run in the place of its executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# The tensors of the batch that a library takes, by leaf; they have no values.
LibraryLeaves = Sequence[tuple[int, torch.Tensor]]


@dataclass(frozen=True)
class Library:
    """A prefix as a shared library."""

    code: bytes = b""
    leaves: LibraryLeaves = ()
