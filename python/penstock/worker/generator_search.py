# SPDX-License-Identifier: Apache-2.0
"""Find the random generators that a dataset has in its attributes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from penstock.worker.reachable import reachable

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def generators_in(dataset: Any) -> list[Any]:
    """Return the generators that are reachable through attributes and small containers."""
    found = reachable(dataset, _GENERATORS)
    return [one for one in found if not isinstance(one, random.SystemRandom)]
