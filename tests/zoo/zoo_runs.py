# SPDX-License-Identifier: Apache-2.0
"""Lives of a model: training, then evaluation, then training under hooks, with a cut or without.

Everything that can be seen of a life is kept as bytes and counts, so that two of them can be
compared; `without_cut` is the life that the user had before.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from cut_models import Case
from in_process_pool import InProcessPool
from offload_training import batches_of, bits, fresh, generator_states, train
from torch import nn
from torch.utils._pytree import tree_leaves

from penstock.cut.offloading import detach, offload, offloaded_call
from penstock.graph.plan import Plan

EVALUATED = 3
HOOKED = 2


@dataclass
class ModelRun:
    """All that is visible of one model's life from outside. A plan is no part of it."""

    trained: list[bytes]
    evaluated: list[bytes] = field(default_factory=list)
    hooked: list[tuple[str, list[bytes]]] = field(default_factory=list)
    retrained: list[bytes] = field(default_factory=list)
    state_names: list[str] = field(default_factory=list)
    reloaded: list[bytes] | None = None  # None: this model cannot be saved whole


def differences(life: ModelRun, expected: ModelRun) -> list[str]:
    """In which parts two lives differ, and where first. Parts that one did not live count too."""
    found: list[str] = []
    for part in dataclasses.fields(ModelRun):
        ours, theirs = getattr(life, part.name), getattr(expected, part.name)
        if ours == theirs:
            continue
        if ours is None or theirs is None or len(ours) != len(theirs):
            found.append(f"{part.name}: another number of values")
        else:
            wrong = [
                index
                for index, pair in enumerate(zip(ours, theirs, strict=True))
                if pair[0] != pair[1]
            ]
            found.append(f"{part.name}: {len(wrong)} of {len(ours)} values, first {wrong[0]}")
    return found


@functools.cache
def without_cut(case: Case) -> ModelRun:
    """The life of a model without offloading; it is run once and remembered."""
    model, batches = fresh(case.make_model), InProcessPool(batches_of(case))
    life = ModelRun(train(model, batches, case.loss))
    finish_run(case, model, batches, life)
    return life


class CutRun(NamedTuple):
    life: ModelRun
    plan: Plan | None  # at the end of training
    shipped_count: int  # boundary tensors made for training


def with_cut(case: Case, cut: Any, *, is_whole: bool = True) -> CutRun:
    """The same life with `cut`; if not `is_whole`, no more of it than training."""
    pool = InProcessPool(batches_of(case))
    model = offload(fresh(case.make_model), pool, cut=cut)
    life = ModelRun(train(model, pool, case.loss))
    trained = CutRun(life, pool.plan, pool.shipped_count)
    if is_whole:
        finish_run(case, model, pool, life)
    detach(model)
    return trained


def is_affected_by_wrong_worker(case: Case) -> bool:
    """Whether there is any effect when the worker is wrong after its first batch was compared:
    another training, an error, or detection of the worker."""
    pool = InProcessPool(batches_of(case))
    model = offload(fresh(case.make_model), pool, cut="maximal")

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        pool.corrupts_results = bool(pool.shipped_count)
        return case.loss(model, batch)

    try:
        trained = train(model, pool, loss)
    except (IndexError, RuntimeError):
        return True  # an index may be too large with its lowest bit flipped
    call = offloaded_call(model)
    is_found_out = call is None or call.context.mismatches > 0
    detach(model)
    return is_found_out or trained != without_cut(case).trained


def finish_run(case: Case, model: nn.Module, batches: InProcessPool, life: ModelRun) -> None:
    """The actions after training: evaluates, trains on under hooks, saves and loads."""
    has_modes = try_mode(model, False)
    life.evaluated = evaluate(case, model, batches)
    if has_modes:
        try_mode(model, True)
    life.hooked, life.retrained = train_hooked(case, model, batches)
    life.state_names = list(model.state_dict())
    life.reloaded = reload(case, model)


def try_mode(model: nn.Module, is_training: bool) -> bool:
    """Switches between training and evaluation; exported programs have one permanent mode."""
    try:
        model.train(is_training)
    except NotImplementedError:
        return False
    return True


def evaluate(case: Case, model: nn.Module, batches: Any) -> list[bytes]:
    """Losses without gradients, and the generators after them."""
    trace: list[bytes] = []
    torch.manual_seed(99)
    with torch.no_grad():
        for _, batch in zip(range(EVALUATED), batches, strict=False):
            trace.append(bits(case.loss(model, batch)))
    return trace + generator_states()


def train_hooked(
    case: Case, model: nn.Module, batches: Any
) -> tuple[list[tuple[str, list[bytes]]], list[bytes]]:
    """Continues training with forward hooks, added only now, on the model and on a module inside
    it.

    Returns every call of a hook with the results that it was shown.
    """
    calls: list[tuple[str, list[torch.Tensor]]] = []

    def note(name: str, module: nn.Module, inputs: Any, result: Any) -> None:
        calls.append((name, [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]))

    handles = [
        module.register_forward_hook(functools.partial(note, name))
        for name, module in hooked_modules(model).items()
    ]
    batches = [batch for _, batch in zip(range(HOOKED), batches, strict=False)]
    trace = train(model, batches, case.loss)
    for handle in handles:
        handle.remove()
    return [(name, [bits(tensor) for tensor in shown]) for name, shown in calls], trace


def hooked_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The model itself, its first module and the last one; the first often moves, the last never.

    TorchScript modules take no hooks.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    return dict([*found[:2], *found[-1:]])


def reload(case: Case, model: nn.Module) -> list[bytes] | None:
    """The model's output after `torch.save` and `torch.load`, and its deep copy's output."""
    file = io.BytesIO()
    try:
        torch.save(model, file)
        file.seek(0)
        twins = [torch.load(file, weights_only=False), copy.deepcopy(model)]
    except Exception:
        return None
    trace: list[bytes] = []
    for twin in twins:
        torch.manual_seed(5)
        with torch.no_grad():
            trace.append(bits(case.loss(twin, case.make_batch(0))))
        trace += [bits(tensor) for tensor in twin.state_dict().values()]
    return trace
