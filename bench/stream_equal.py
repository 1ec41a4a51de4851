# SPDX-License-Identifier: Apache-2.0
"""Whether penstock's batches are torch's, bit for bit: a fast loader of other batches is worthless.

Two epochs of both loaders from the same seeds: types and nesting, dtypes, shapes, strides and bytes
of every batch, and the final state of torch's generator.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

SEED = 20_231


def first_difference(build: Any, loader_classes: tuple[Any, Any]) -> str | None:
    """Runs both loaders over `build()`'s arguments, and returns the place where they differ, or
    None."""
    theirs, ours = (_digests(loader_class, build()) for loader_class in loader_classes)
    for index, (their, our) in enumerate(zip(theirs, ours, strict=False)):
        if their != our:
            return f"entry {index} of {len(theirs)} differs: torch {their}, penstock {our}"
    if len(theirs) != len(ours):
        return f"torch gave {len(theirs)} entries, penstock {len(ours)}"
    return None


def _digests(loader_class: Any, arguments: dict[str, Any]) -> list[str]:
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    loader = loader_class(**arguments)
    digests = []
    for epoch in range(2):
        digests += [f"batch of epoch {epoch}: {digest(batch)}" for batch in loader]
        digests.append(f"generator after epoch {epoch}: {digest(torch.get_rng_state())}")
    return digests


def digest(value: Any) -> str:
    state = hashlib.blake2b(digest_size=12)
    _update(state, value)
    return state.hexdigest()


def _update(state: hashlib.blake2b, value: Any) -> None:
    state.update(type(value).__qualname__.encode() + b"(")
    if isinstance(value, torch.Tensor):
        state.update(f"{value.dtype} {tuple(value.shape)} {value.stride()} ".encode())
        state.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _update(state, key)
            _update(state, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _update(state, item)
    else:
        state.update(repr(value).encode())
    state.update(b")")
