# SPDX-License-Identifier: Apache-2.0
"""The state that the captured graphs of one offloaded model share."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from penstock.cut.installed_prefixes import InstalledPrefixes, PrefixHost
from penstock.cut.model_call import ModelCall
from penstock.cut.shown_plan import PlanHost, ShownPlan
from penstock.cut.withholding import LeafWithholding
from penstock.graph.link import Link
from penstock.graph.plan import Plan
from penstock.graph.planning import CutOptions
from penstock.program_line import program_line
from penstock.tracking.batch_origin import ProvenanceTable
from penstock.tracking.lazy_batches import LazyBatches

if TYPE_CHECKING:
    from penstock.cut.repricing import Repricer
    from penstock.tuning.load_meter import LoadMeter

logger = logging.getLogger(__name__)

# After this many calls in a row without a batch of the loader, the plan says so.
FOREIGN_CALLS_MAX = 16
# How many calls may go back to the trainer one after the other before all do.
MISTRUSTS_MAX = 4


class CutHost(PlanHost, PrefixHost, Protocol):
    """The part of the loader that a cut needs."""

    _load_meter: LoadMeter | None

    def _link(self) -> Link | None: ...


@dataclass
class CutContext:
    """Confined to the training thread."""

    target: Any  # the model, or the function that stands for a training step; held weakly
    host: weakref.ref[CutHost]
    provenance: ProvenanceTable
    options: CutOptions
    verify_every: int
    name: str = ""  # of the model, for people
    user: int = field(init=False)  # the number of the offloaded model at its loader
    is_open: bool = True  # False once cutting was given up
    repricer: Repricer | None = None  # with cut="auto", while nothing random may move
    mistrusts: int = 0  # how often a worker was found to be wrong
    call_weight: int = 1  # how many calls this one stands for, the others being like it
    withholding: LeafWithholding | None = None  # of the loader, where leaves may stay behind
    call: ModelCall = field(default_factory=ModelCall)  # that runs, or ran last
    lazy: LazyBatches = field(init=False)
    plan: ShownPlan = field(init=False)
    prefixes: InstalledPrefixes = field(init=False)
    _foreign_calls: int = 0  # since the last call with a tensor of the loader
    _captured_count: int = 0  # graphs

    def __post_init__(self) -> None:
        self.name = self.name or spoken_model(self.target)
        self.target = weakly(self.target)
        self.user = self.provenance.use.new_user()
        self.lazy = LazyBatches(self.provenance, self.user)
        self.plan = ShownPlan(self.name, self.user, self.host, self.provenance.use)
        self.prefixes = InstalledPrefixes(self.user, self.host, self.provenance.use)

    def buffers(self) -> Iterator[torch.Tensor]:
        """Tensors that are the model's own, wherever in its forward they are met."""
        for module in modules_of(self.target()):
            yield from module.buffers()

    def options_of_graph(self) -> CutOptions:
        """To be called for each captured graph: the options, and a name for its draws."""
        self._captured_count += 1
        name = f"{self.options.draws_of}.{self._captured_count}"
        return replace(self.options, draws_of=name)

    def with_link(self, options: CutOptions) -> CutOptions:
        """The options with the link to the workers as it is now."""
        host = self.host()
        link = None if host is None else host._link()
        if link is not None and self.withholding is None:
            link = link._replace(sends_whole=True)
        return replace(options, link=link)

    def begin_call(self) -> None:
        """To be called before the model runs."""
        self.call = ModelCall()
        self.provenance.use.note_call(self.user, self.name)

    def end_call(self, has_run_graph: bool) -> None:
        """To be called after the model ran."""
        call = self.call
        if has_run_graph:
            self._note_foreign()
            self.lazy.note_call(call.has_stranger, call.follows_calls, call.moves)
            if self.is_open:
                self.prefixes.note_call(call.batch)
            if self.is_open and self.withholding is not None:
                self.withholding.note_call(self.user, call.batch, call.cuts)
        if self.is_open:
            self.plan.note_call(call)

    def mistrust(self, operators: Sequence[str], message: str) -> None:
        """Notes that workers were wrong about `operators`: their other results are compared
        anew."""
        logger.warning("penstock: %s", message)
        self.mistrusts += 1
        if self.mistrusts > MISTRUSTS_MAX:
            self.give_up(
                f"the workers' results of {', '.join(operators)} and of {MISTRUSTS_MAX} calls "
                "before differed from the trainer's own"
            )

    def _note_foreign(self) -> None:
        """Counts calls without any tensor of the loader, so that a cut that never comes has a
        reason."""
        if self.lazy.is_sampling:
            return  # most calls are to see nothing of their batches
        self._foreign_calls = self._foreign_calls + 1 if self.call.is_foreign else 0
        if self._foreign_calls == FOREIGN_CALLS_MAX and self.call.has_written:
            self.plan.refuse(
                f"{FOREIGN_CALLS_MAX} calls in a row were given a tensor of the batch that was "
                "written to in place before (x.clamp_(), x /= 255), and the workers' results are "
                "those of the batch as it came; make another tensor of it (x = x.clamp(), "
                "x = x / 255), or offload a function that does it and calls the model"
            )
        elif self._foreign_calls == FOREIGN_CALLS_MAX:
            self.plan.refuse(
                f"{FOREIGN_CALLS_MAX} calls in a row were given no tensor of the batch, and nothing"
                " that follows from one by operators that can be followed (random ones, indexing "
                "and other libraries cannot; offload a function that does it and calls the model, "
                "or leave it to the dataset)"
            )

    def give_up(self, reason: str) -> None:
        """Stops cutting for good; training goes on with whole graphs."""
        if self.is_open:
            logger.warning(
                "penstock: %s; the whole of %s runs in the trainer from here on", reason, self.name
            )
            self.close(Plan(refused=reason))

    def close(self, plan: Plan | None = None) -> None:
        """Stops cutting and withdraws the workers' prefixes; the loader shows `plan` then."""
        self.is_open = False
        self.lazy.give_up()
        self.prefixes.close()
        forget_user(self.user, self.host, self.provenance)
        if plan is not None:
            self.plan.show(plan)


def forget_user(user: int, host: Callable[[], CutHost | None], provenance: ProvenanceTable) -> None:
    """Frees what a loader has for an offloaded model that is detached, or gone."""
    if provenance.deferral is not None:
        provenance.deferral.forget_user(user)
    if provenance.withholding is not None:
        provenance.withholding.forget(user)
    loader = host()
    unused = provenance.use.drop_prefixes_of(user)
    plan = provenance.use.set_plan(user, None)
    needs_no_meter = provenance.use.drop_meter(user)
    if loader is None:
        return
    if unused:
        loader._remove_prefixes(unused)
    loader._show_plan(plan)
    if needs_no_meter:
        loader._load_meter = None  # from the next epoch on nothing is measured


def weakly(target: Any) -> Callable[[], Any]:
    """A reference to a model or a function that does not keep it."""
    try:
        return weakref.WeakMethod(target) if inspect.ismethod(target) else weakref.ref(target)
    except TypeError:  # an object that is called and has no weak references
        return lambda: target


def spoken_model(model: Any) -> str:
    """The model's class, or a function's name, and the line of the program that offloads it."""
    name = type(model).__name__
    if not isinstance(model, torch.nn.Module):
        name = getattr(model, "__name__", name)
    line = program_line()
    return f"{name}, offloaded at {line}," if line else name


def modules_of(target: Any) -> Iterator[torch.nn.Module]:
    """The model itself, or the models that a function can name: the object it is bound to, those it
    closes over, and those among its globals."""
    if isinstance(target, torch.nn.Module):
        yield target
    elif isinstance(target, functools.partial):
        for value in (target.func, *target.args, *target.keywords.values()):
            yield from modules_of(value)
    elif inspect.ismethod(target):
        yield from modules_of(target.__self__)
        yield from modules_of(target.__func__)
    elif inspect.isfunction(target):
        closed = inspect.getclosurevars(target)
        for value in (*closed.nonlocals.values(), *closed.globals.values()):
            if isinstance(value, torch.nn.Module):
                yield value
            elif isinstance(getattr(value, "__dict__", None), dict) and not callable(value):
                yield from (v for v in vars(value).values() if isinstance(v, torch.nn.Module))
