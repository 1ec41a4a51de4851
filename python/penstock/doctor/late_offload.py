# SPDX-License-Identifier: Apache-2.0
"""Offloads a program's model to a loader when it is first called with one of its batches."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from penstock.seams.modules import Patch
from penstock.tracking.leaves import flatten_batch


class LateOffload:
    """Watches the calls of models until one takes a tensor of a batch, and calls ``found`` with it
    before it runs. Confined to the process that makes it."""

    def __init__(self, found: Callable[[torch.nn.Module], None]) -> None:
        self._found = found
        self._pid = os.getpid()
        self._patch: Patch | None = None
        self._leaves: set[int] = set()
        self._batch: Any = None  # keeps the tensors whose ids are noted
        self._is_on = False

    def begin(self) -> None:
        watch = self

        def watched(call: Any) -> Any:
            def watched_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
                if watch._is_on and os.getpid() == watch._pid and watch._is_of_batch(args, kwargs):
                    if next(self.parameters(), None) is not None:
                        watch.end()
                        watch._found(self)
                        return self(*args, **kwargs)
                return call(self, *args, **kwargs)

            return watched_call

        self._is_on = True
        self._patch = Patch(torch.nn.Module, "__call__", watched)

    def end(self) -> None:
        if self._patch is not None:
            self._is_on = False
            self._patch.undo()
            self._patch = None
            self._batch, self._leaves = None, set()

    def note(self, batch: Any) -> None:
        """The program was given a batch of the loader."""
        if self._is_on:
            self._batch = _tensors(batch)
            self._leaves = {id(leaf) for leaf in self._batch}

    def _is_of_batch(self, args: Any, kwargs: Any) -> bool:
        return any(id(tensor) in self._leaves for tensor in _tensors((args, kwargs)))


def _tensors(value: Any) -> list[torch.Tensor]:
    try:
        return flatten_batch(value)
    except (AttributeError, RecursionError):
        return []
