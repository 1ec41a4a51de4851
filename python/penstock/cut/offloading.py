# SPDX-License-Identifier: Apache-2.0
"""`offload`: move the calls of a model that depend only on the batch into the loader's workers.

It installs a penstock Dynamo backend by way of `model.compile`, so the model keeps its class, its
parameters, its hooks and its state_dict. For any unsupported construct, the model runs as it did
before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from penstock.compat.devices import accelerator_type
from penstock.compat.dynamo import OptimizedModule, has_lazy_modules
from penstock.compat.modules import COMPILED_CALL, compiled_call_of, module_call
from penstock.compat.operators import tree_leaves
from penstock.cut.captured_graphs import compiled_target, user_compile_of
from penstock.cut.cut_context import CutContext, LeafWithholding, modules_of
from penstock.cut.offloaded_call import OffloadedCall, StandIn
from penstock.cut.repricing import Repricer
from penstock.cut.script_models import OffloadedScript
from penstock.graph.plan import Plan
from penstock.graph.planning import CutMode, CutOptions
from penstock.graph.tolerance import Tolerance
from penstock.loader.loader_run import LoaderRun, innermost_loader, run_of
from penstock.tracking.batch_origin import ProvenanceTable
from penstock.tracking.lazy_tensor import LazyTensor, hide_dynamo_advice
from penstock.tuning.load_meter import LoadMeter, TrainerClock

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Callable[..., Any])

_SCRIPTS = (torch.jit.ScriptModule, torch.jit.ScriptFunction)
_CALL = "_penstock_call"  # the attribute of a function that replaces another


def offload(
    model: M,
    loader: torch.utils.data.DataLoader[Any],
    *loaders: torch.utils.data.DataLoader[Any],
    cut: CutMode = "auto",
    allow_random: bool = False,
    verify_every: int = 1000,
    compile_prefix: bool = False,
    cut_tolerance: int | float | None = None,
) -> M:
    """Run the part of a model that depends only on the batch in a loader's workers.

    The cut is found at the first forward with a batch of ``loader``; ``loader.plan`` shows it. The
    model keeps its class, its parameters, its hooks and its state_dict. Unless ``allow_random`` or
    ``cut_tolerance`` is used, training results stay bit-for-bit identical. If a model cannot be
    handled, one warning is logged, ``loader.plan.refused`` has the reason, and training continues
    as without this call.

    A model that is used with several loaders is offloaded to all of them, in one call or in
    several: ``offload(model, train, val)``. Each loader has a separate plan. A further call with
    the same loader replaces its offload; ``detach(model)`` undoes all of them.

    Args:
        model (torch.nn.Module | Callable): Model, or a function such as a training step with the
            loss in it. The calls of a function on the batch before it calls the model may move,
            too.
        loader (DataLoader): A ``penstock.DataLoader``, or the result of accelerate's ``prepare()``
            or Fabric's ``setup_dataloaders()`` for one.
        *loaders (DataLoader): Further loaders, such as the validation loader.
        cut (str): ``"auto"`` chooses the cut by price; the price is measured again while the loader
            runs, and the cut changed accordingly. ``"maximal"`` moves every call that can move,
            ``"none"`` none. Default: ``"auto"``.
        allow_random (bool): Move all random draws that can move, regardless of the price. Their
            numbers then follow from ``torch.initial_seed()``, the seed of the epoch and the
            position of the batch in it, on either side, and no generator advances; the cut is not
            changed later. Default: False.
        verify_every (int): Number of batches, 1 or more, of which one is also computed in the
            trainer and compared, in addition to the first batch of each worker. Default: 1000.
        compile_prefix (bool): Compile the moved calls with AOTInductor, in a process in parallel to
            the training; needs a C++ compiler. A worker uses the compiled code once it has verified
            that it gives the same bits in less time. Default: False.
        cut_tolerance (int | float | None): Allowed difference between the results of a worker's CPU
            and a GPU. An integer of 1 or more is a number of units in the last place of each value,
            a float above 0 and below 1 an error relative to the largest value of the tensor.
            Training is then no longer bit-for-bit identical. Comparisons measure the difference,
            ``loader.plan`` shows the largest one so far, and a call that exceeds the tolerance
            returns to the GPU, with a warning. Default: None, which keeps calls with a difference
            on the GPU.

    Returns:
        torch.nn.Module | Callable: ``model`` if it is a module, else a function to be called in its
        place.

    Raises:
        ValueError: If ``cut``, ``verify_every`` or ``cut_tolerance`` has an invalid value.
        TypeError: If ``model`` is not callable or is a ``torch.export.ExportedProgram``, or a
            loader is not a ``torch.utils.data.DataLoader``.

    See Also:
        :func:`penstock.explain` shows the plan without changing anything.

    Example::

        model = penstock.offload(model, train, val)
        for inputs, target in train:
            loss = criterion(model(inputs), target)
        with torch.no_grad():
            for inputs, target in val:
                accuracy(model(inputs), target)

    A training step::

        @functools.partial(penstock.offload, loader=loader)
        def training_step(batch):
            images = batch["image"].to(device).float() / 255
            return criterion(model(images), batch["label"].to(device))
    """
    if verify_every < 1:
        raise ValueError(f"verify_every must be >= 1, got {verify_every}")
    tolerance = Tolerance.of(cut_tolerance)
    if isinstance(model, torch.export.ExportedProgram):
        raise TypeError(
            "offload needs a module or a function, got an ExportedProgram, which makes a new "
            "module for each call of module(); offload one of these modules and train it: "
            "model = penstock.offload(program.module(), loader)"
        )
    if not callable(model):
        raise TypeError(f"offload needs a module or a function, got a {type(model).__name__}")
    own = [innermost_loader(one) for one in (loader, *loaders)]
    for one in own:
        if not isinstance(one, torch.utils.data.DataLoader) and not _is_ours(one):
            raise TypeError(
                f"offload needs a penstock.DataLoader, got a {type(one).__name__}; import it with "
                f"`from penstock import DataLoader`"
            )
    for one in own:
        worker_count = max(1, int(getattr(one, "num_workers", 0) or 0))
        options = CutOptions(cut, allow_random, worker_count, tolerance=tolerance)
        former = offloaded_call(model)
        if former is not None and (call_of_one := _call_for(former, one)) is not None:
            model = _without(model, former, call_of_one)
        call = _make_call(model, one, options, verify_every, compile_prefix)
        if call is not None:
            model = _install_call(model, call)
    return model


def _make_call(
    model: Any, loader: Any, options: CutOptions, verify_every: int, compile_prefix: bool
) -> OffloadedCall | OffloadedScript | None:
    """Return the call that replaces `model` for batches of `loader`.

    Return None, with a warning, if no call can be moved.
    """
    with _without_offload(model) as bare:
        reason = _refusal(bare, loader)
        if reason is not None:
            logger.warning("penstock: offload has no effect: %s", reason)
            if _is_ours(loader):
                run_of(loader).show_plan(Plan(refused=reason))
            return None
        run = run_of(loader)
        if run.provenance is None:
            run.provenance = ProvenanceTable()
        name = f"{torch.initial_seed()}.{run.provenance.model_count}"
        run.provenance.model_count += 1
        options = dataclasses.replace(options, draws_of=name)
        user = None if isinstance(bare, _SCRIPTS) else user_compile_of(bare)
        target = bare if user is None else compiled_target(bare)
        context = CutContext(target, weakref.ref(run), run.provenance, options, verify_every)
        _share_withholding(run, context)
        if isinstance(bare, torch.jit.ScriptModule):
            return OffloadedScript(context, bare, bare.forward)
        if isinstance(bare, _SCRIPTS):
            return OffloadedScript(context, bare, bare)
        if user is None:
            hide_dynamo_advice()
        if compile_prefix:
            context.prefixes.compile()
        if options.mode == "auto" and not options.allow_random and user is None:
            # With random draws, another plan would make training depend on timing.
            context.repricer = _repricer(bare, run, context)
        if not isinstance(bare, torch.nn.Module):
            return OffloadedCall(context, bare, bare, user)
        former = bare.__dict__.get(_call_attribute(bare))
        call_impl = module_call(bare) if former is None else former
        return OffloadedCall(context, call_impl, bare, user, former)


@contextlib.contextmanager
def _without_offload(model: Any) -> Iterator[Any]:
    """Yield the model without `offload`, for the duration of the context."""
    call = offloaded_call(model)
    if call is None:
        yield model
    elif not isinstance(model, torch.nn.Module):
        yield call.call_impl
    else:
        place = _call_attribute(model)
        model.__dict__[place] = call.former
        try:
            yield model
        finally:
            model.__dict__[place] = call


def _install_call(model: Any, call: OffloadedCall | OffloadedScript) -> Any:
    """Install `call` where `model` is called, in addition to the calls of other loaders."""
    former = offloaded_call(model)
    if former is None:
        if not isinstance(model, torch.nn.Module):
            return _wrap_function(model, call)
        # TorchScript does not use this attribute: it calls the module's program.
        model.__dict__[_call_attribute(model)] = call
        return model
    if not isinstance(former, LoaderDispatch):
        former = LoaderDispatch(former)
        _replace(model, former)
    former.add(call)
    return model


def _call_for(call: Any, loader: Any) -> Any:
    """Return the part of a model's stand-in that belongs to a loader, or None."""
    if not _is_ours(loader):
        return None
    calls = call.calls if isinstance(call, LoaderDispatch) else (call,)
    return next((one for one in calls if one.context.host() is run_of(loader)), None)


def _without(model: Any, call: Any, own: Any) -> Any:
    """Return the model without the call of one loader."""
    if call is own:
        return detach(model)
    call.remove(own)
    return model


def _replace(model: Any, call: Any) -> None:
    if isinstance(model, torch.nn.Module):
        model.__dict__[_call_attribute(model)] = call
    else:
        setattr(model, _CALL, call)


def _repricer(model: Any, run: LoaderRun, context: CutContext) -> Repricer:
    modules = modules_of(model)
    devices = {parameter.device for module in modules for parameter in module.parameters()}
    device = next((one for one in devices if one.type == accelerator_type()), None)
    if run.load_meter is None:
        run.load_meter = LoadMeter()
    run.load_meter.clock = TrainerClock(device)
    context.provenance.use.take_meter(context.user)
    return Repricer(run.load_meter, TrainerClock(device))


def _share_withholding(run: LoaderRun, context: CutContext) -> None:
    """Let the loader's leaves stay with the workers if the model does not need them."""
    shared = context.provenance.withholding
    own = shared if isinstance(shared, LeafWithholding) else None
    if own is None:
        run_ref = weakref.ref(run)

        def changed() -> None:
            live = run_ref()
            if live is not None and live.load_meter is not None:
                live.load_meter.native.forget()  # batches have other sizes from now on

        own = LeafWithholding(run_ref, changed)
        context.provenance.withholding = own
    context.withholding = own
    own.take(context.user, context.verify_every)


def detach(model: M) -> M:
    """Undo :func:`penstock.offload` for all loaders of a model.

    The model runs as before, and the workers stop running its moved calls.

    Args:
        model (torch.nn.Module | Callable): Result of ``offload``. Another model is returned as it
            is.

    Returns:
        torch.nn.Module | Callable: The model, or the function that was offloaded.

    Example::

        model = penstock.detach(model)
    """
    call = offloaded_call(model)
    if call is None:
        return model
    call.close()
    if isinstance(model, torch.nn.Module):
        model.__dict__[_call_attribute(model)] = call.former
        return model
    return call.call_impl  # type: ignore[return-value]


def offloaded_call(model: Any) -> OffloadedCall | OffloadedScript | LoaderDispatch | None:
    """Return the callable by which `offload` replaced a module's call or a function, or None."""
    if isinstance(model, torch.nn.Module):
        call = model.__dict__.get(_call_attribute(model))
    else:
        call = getattr(model, _CALL, None)
    return call if isinstance(call, (OffloadedCall, OffloadedScript, LoaderDispatch)) else None


class LoaderDispatch(StandIn):
    """Replaces the call of a model that is used with several loaders.

    Confined to the training thread.

    The model has a separate offloaded call for each loader, with separate plans. A call of the
    model belongs to the loader of its tensors; if that is unknown, to the loader that delivered
    last.
    """

    def __init__(self, first: Any) -> None:
        self._calls = [first]  # OffloadedCall or OffloadedScript, by loader
        self.call_impl = first.call_impl
        self.former = first.former

    @property
    def context(self) -> Any:  # type: ignore[override]
        """Return the context of the loader that delivered last."""
        return self._newest().context

    @property
    def calls(self) -> tuple[Any, ...]:
        return tuple(self._calls)

    def add(self, call: Any) -> None:
        """Add a call, and close the calls of loaders that were deleted."""
        for old in [old for old in self._calls if old.context.host() is None]:
            self._calls.remove(old)
            old.close()
        self._calls.append(call)

    def remove(self, call: Any) -> None:
        self._calls.remove(call)
        call.close()

    def close(self) -> None:
        for call in self._calls:
            call.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call_of((args, kwargs))(*args, **kwargs)

    def _call_of(self, arguments: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        for call in self._calls:
            if any(_is_of(call.context.provenance, tensor) for tensor in tensors):
                return call
        return self._newest()

    def _newest(self) -> Any:
        """Return the call of the loader that delivered last, among the loaders that are alive."""
        return max(
            self._calls,
            key=lambda call: (
                call.context.host() is not None,
                call.context.provenance.delivered_at,
            ),
        )


def _is_of(provenance: ProvenanceTable, tensor: torch.Tensor) -> bool:
    """Return whether a tensor is from the loader with that table, or a lazy value of its batch."""
    value = tensor._value if type(tensor) is LazyTensor else None
    if value is not None:
        return value.table.provenance is provenance
    return provenance.lookup(tensor) is not None


def _call_attribute(model: torch.nn.Module) -> str:
    """Return the attribute whose function is called in place of the module's forward."""
    has_own = isinstance(model, (OptimizedModule, torch.jit.ScriptModule))
    return "forward" if has_own else COMPILED_CALL


def _wrap_function(function: M, call: OffloadedCall | OffloadedScript) -> M:
    @functools.wraps(function)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        return getattr(offloaded, _CALL)(*args, **kwargs)

    setattr(offloaded, _CALL, call)
    return offloaded  # type: ignore[return-value]


def _is_ours(loader: Any) -> bool:
    return isinstance(getattr(loader, "_run", None), LoaderRun)


def _kind_of(loader: Any) -> str:
    kind = type(loader)
    if kind is torch.utils.data.DataLoader:
        return "torch.utils.data.DataLoader"
    return f"a {kind.__qualname__}"


def _refusal(model: Any, loader: Any) -> str | None:
    is_compiled = isinstance(model, OptimizedModule) or compiled_call_of(model) is not None
    if is_compiled and user_compile_of(model) is None:
        return "the model's call was replaced by something other than torch.compile"
    if isinstance(model, OptimizedModule) and has_lazy_modules(model):
        return "the compiled model has lazy modules; run it once before it is offloaded"
    if not _is_ours(loader):
        return (
            f"the loader is {_kind_of(loader)}, not a penstock.DataLoader; make it with "
            "`from penstock import DataLoader`, or call penstock.install() before a framework "
            "makes it"
        )
    if loader.num_workers == 0 and loader.pool is None:
        return (
            "the loader has num_workers=0, so there is no worker to move anything to; pass "
            "num_workers=1 or more, or pool= with the address of a pool"
        )
    if loader.replica_group is not None:
        return (
            "the loader has a replica_group, whose ranks share batches, but each rank's model is a "
            "different part of the whole"
        )
    return None
