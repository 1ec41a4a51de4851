# SPDX-License-Identifier: Apache-2.0
"""``start_prefetch()``: an iterator that is made before the program calls ``iter()``, and waits.

The draws of ``iter()`` were made, and its workers started, then. Until the program gets it, the
loader reports the state from before; and if the program has meanwhile changed the inputs of the
batches, the iterator is dropped and another made in its place, from the same starting point.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.compat.iterators import BaseIterator
from penstock.errors import UnsupportedError
from penstock.loader.loader_run import RunSnapshot, run_of
from penstock.loader.loader_state import state_of_now
from penstock.loader.options import LoaderOptions
from penstock.stream.batch_seeds import generator_states, have_moved
from penstock.stream.progress import (
    GeneratorSnapshot,
    GeneratorsReplayed,
    Progress,
    own_generators,
    sampler_states,
)
from penstock.stream.shard_state import StateFailure, copied_state, load_between_epochs

_Begin = Callable[[], BaseIterator]
# Torch's options that may be assigned after construction, and that a new iterator uses.
_ASSIGNABLE = (
    "collate_fn",
    "generator",
    "in_order",
    "multiprocessing_context",
    "num_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)
_PLAIN = (int, float, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class _LoaderSnapshot:
    """Loader before ``start_prefetch()``."""

    state: dict[str, Any] | RuntimeError  # or the error, if an object has no state to return
    run: RunSnapshot
    of_samplers: dict[str, Any]  # the states of samplers that have one
    workers_stay: tuple[Any, Any] | None  # the account and the seeds of an iterator that continues

    @staticmethod
    def take(loader: DataLoader[Any]) -> _LoaderSnapshot:
        options, run = LoaderOptions.of(loader), run_of(loader)
        running: Any = getattr(loader, "_iterator", None)
        goes_on = running is not None and running.own_options == options.kept
        state: dict[str, Any] | RuntimeError
        try:
            state = state_of_now(options, run, running, asks_workers=run.wants_states)
        except RuntimeError as error:
            state = error
        return _LoaderSnapshot(
            state=state,
            run=RunSnapshot.take(run, options),
            of_samplers=sampler_states(options) or {},
            workers_stay=(running._progress, running._seeds) if goes_on else None,
        )


class StartedPrefetch:
    """Iterator that waits for the program's ``iter()``. Confined to the trainer's thread."""

    def __init__(self, loader: DataLoader[Any], begin: _Begin) -> None:
        """Call ``begin``, which makes the loader's next iterator."""
        check_can_start(loader)
        self._before = _LoaderSnapshot.take(loader)
        iterator: Any = begin()
        self.iterator = iterator
        self._globals_after = generator_states()
        self._own_after = _own_states(loader)
        self._inputs = self._inputs_now(loader)
        self._answered_count: int = iterator._progress.answered_count

    @property
    def state(self) -> dict[str, Any]:
        """Return the state before the loader's prefetching was started, for its
        ``state_dict()``."""
        if isinstance(self._before.state, RuntimeError):
            raise self._before.state
        return copied_state(self._before.state)

    @property
    def is_fresh(self) -> bool:
        """Return whether it starts without a loaded state."""
        return self._before.run.loaded_state is None

    def is_reusable(self, loader: DataLoader[Any]) -> bool:
        """Return whether another iterator would give the same batches now, in the same way."""
        return (
            self.iterator._owner_pid == os.getpid()  # a forked child has none of the workers
            and not self.iterator._shutdown
            and self.iterator._progress.answered_count == self._answered_count
            and self.iterator.own_options == LoaderOptions.of(loader).kept
            and _are_same(self._inputs, self._inputs_now(loader))
            and all(
                name in self._own_after and torch.equal(state, self._own_after[name])
                for name, state in _own_states(loader).items()
            )
        )

    def drop(self, loader: DataLoader[Any]) -> bool:
        """End the iterator, and restore the loader's earlier state. Returns whether the global
        generators are restored, too: if the program drew from them meanwhile, they stay.

        Samplers and generators that the program has changed meanwhile stay as they are.
        """
        before, were_moved = self._before, have_moved(self._globals_after)
        if before.workers_stay is not None:
            self.iterator._progress, self.iterator._seeds = before.workers_stay
        else:
            self.iterator._shutdown_workers()
            loader._iterator = None
        if not were_moved:
            before.run.generators.restore_globals()
        for name, generator in own_generators(loader).items():
            after = self._own_after.get(name)
            if after is not None and torch.equal(generator.get_state(), after):
                generator.set_state(before.run.generators.of_own[name])
        if before.run.loaded_state is None:
            inputs = self._inputs_now(loader)
            for name, state in before.of_samplers.items():
                is_same = _are_same(_with_name(self._inputs, name), _with_name(inputs, name))
                if is_same and not isinstance(state, StateFailure):
                    load_between_epochs(getattr(loader, name), state)
        before.run.restore(run_of(loader))
        return not were_moved

    def restart(self, loader: DataLoader[Any], begin: _Begin) -> BaseIterator:
        """Drop the iterator and make another, which repeats the draws of this one."""
        run = run_of(loader)
        if self.drop(loader) or run.loaded_state is not None:
            return begin()  # a state has the generators that it starts with
        options = LoaderOptions.of(loader)
        of_now = GeneratorSnapshot.take(options)
        snapshot = GeneratorSnapshot(self._before.run.generators.of_globals, of_now.of_own)
        run.resuming = Progress(run.epoch_count, snapshot, options.shard_count, is_replayed=True)
        try:
            with GeneratorsReplayed(snapshot):
                return begin()
        finally:
            run.resuming = None

    def _inputs_now(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the batches' inputs that the program may have changed. Of samplers and of the
        dataset, these are the attributes that are numbers or texts, such as an epoch."""
        if self._before.workers_stay is not None:  # they keep everything but the order unchanged
            return {"generator": loader.generator, **_plain_attributes(_samplers(loader))}
        holders = {**_samplers(loader), "dataset": loader.dataset}
        assigned = {name: getattr(loader, name) for name in _ASSIGNABLE}
        return {**assigned, **_plain_attributes(holders)}


def check_can_start(loader: DataLoader[Any]) -> None:
    """Raise UnsupportedError if no batch can be made ahead, and ValueError in the middle of an
    epoch.
    """
    options = LoaderOptions.of(loader)
    if options.is_datapipe:
        raise UnsupportedError(
            "start_prefetch() does not support datapipes, which torch's iterator reads; use a "
            "map-style or an iterable dataset, or leave the call out"
        )
    if not options.is_parallel:
        raise UnsupportedError(
            "start_prefetch() requires workers or a pool, got num_workers=0 and no pool, with "
            "which each batch is made when next() is called; use num_workers=1 or more, or leave "
            "the call out"
        )
    newest: Any = run_of(loader).newest
    if newest is None or newest is getattr(loader, "_iterator", None):
        return
    if not newest._progress.is_finished and not getattr(newest, "_shutdown", False):
        raise ValueError(
            "start_prefetch() requires that no iterator of this loader is in the middle of an "
            "epoch, whose position state_dict() returns; read the iterator to its end first, or "
            "delete it"
        )


def _own_states(loader: DataLoader[Any]) -> dict[str, torch.Tensor]:
    return {name: one.get_state() for name, one in own_generators(loader).items()}


def _samplers(loader: DataLoader[Any]) -> dict[str, Any]:
    batch_sampler = loader.batch_sampler
    return {
        "sampler": loader.sampler,
        "batch_sampler": batch_sampler,
        "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
    }


def _plain_attributes(holders: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{holder_name}: {name}": value
        for holder_name, holder in holders.items()
        for name, value in getattr(holder, "__dict__", {}).items()
        if isinstance(value, _PLAIN)
    }


def _with_name(inputs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in inputs.items() if key.startswith(f"{name}: ")}


def _are_same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all(
        one is others[name] or (isinstance(one, _PLAIN) and one == others[name])
        for name, one in some.items()
    )
