# SPDX-License-Identifier: Apache-2.0
"""The common start of both measurements of the cut: one core for the trainer, one for its
worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

# A loader that falls back to torch's has no workers that could run a prefix.
os.environ["PENSTOCK_FALLBACK"] = "error"
MODEL_SEED = 7
KINDS = ("eager", "none", "maximal", "auto")  # "eager" is the same loader without `offload`


def choose_cores() -> tuple[int, int]:
    """A core for the trainer and one for its worker; threads of one core only when there is no
    other."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise SystemExit("cut: this process may use 1 core, but 2 are needed; allow it another")
    trainer = usable[0]
    path = Path(f"/sys/devices/system/cpu/cpu{trainer}/topology/thread_siblings_list")
    siblings = _cpus(path.read_text()) if path.exists() else {trainer}
    others = [cpu for cpu in usable[1:] if cpu not in siblings]
    return trainer, (others or usable[1:])[0]


def pin(core: int) -> None:
    """Moves every thread of this process to `core`; later threads inherit their creator's core."""
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), {core})


class PinTo:
    """A `worker_init_fn` that moves the worker to a separate core."""

    def __init__(self, core: int) -> None:
        self._core = core

    def __call__(self, worker_index: int) -> None:
        pin(self._core)


def prepare_trainer(cores: tuple[int, int], seed: int) -> PinTo:
    """Takes the first core and one thread for this process; returns the function that moves its
    worker to the second."""
    trainer, worker = cores
    pin(trainer)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return PinTo(worker)


def fresh(make_model: Callable[[], nn.Module]) -> nn.Module:
    """The model with the same parameters in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(MODEL_SEED)
        return make_model()


def steps_of(
    model: nn.Module, batches: Iterator[Any], loss_of: Callable[[nn.Module, Any], torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Trains; yields the loss after each step, the fetching of its batch included."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _cpus(text: str) -> set[int]:
    """`0,4-5` as numbers."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
