# SPDX-License-Identifier: Apache-2.0
"""The state that the captured graphs of one offloaded model share.

`CutContext` has it: the call that runs (`ModelCall`), the plan that the loader shows (`ShownPlan`),
and the leaves that stay with a pool's workers (`LeafWithholding`).
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from penstock import _C
from penstock.cut.installed_prefixes import InstalledPrefixes, PrefixHost
from penstock.graph.link import Link
from penstock.graph.plan import Plan, joined
from penstock.graph.plan_record import verdict
from penstock.graph.planning import CutOptions
from penstock.program_line import program_line
from penstock.tracking.batch_origin import BatchHandle, ProvenanceTable
from penstock.tracking.lazy_batches import LazyBatches
from penstock.tracking.loader_use import LoaderUse

if TYPE_CHECKING:
    from penstock.cut.repricing import Repricer
    from penstock.tuning.load_meter import LoadMeter

logger = logging.getLogger(__name__)

# After this many calls in a row without a batch of the loader, the plan says so.
FOREIGN_CALLS_MAX = 16
# How many calls may go back to the trainer one after the other before all do.
MISTRUSTS_MAX = 4


class UsedCut(NamedTuple):
    """The cut of one graph that ran: which leaves the trainer reads, and the boundary tensors that
    stand for the others."""

    raw_leaves: frozenset[int]
    keys: frozenset[str]  # empty where nothing moves
    is_settled: bool  # it was compared, and is not being timed


@dataclass
class ModelCall:
    """One call, which may run several captured graphs. Confined to the training thread."""

    is_foreign: bool = True  # no tensor of the loader was seen so far
    has_written: bool = False  # a tensor of the batch was given that was written to before
    has_stranger: bool = False  # the program may have made an input of the batch
    follows_calls: bool = False  # it has, and it is known how
    has_planned: bool = False
    plans: list[Plan] = field(default_factory=list)  # of the graphs that ran
    cuts: list[UsedCut] = field(default_factory=list)  # the same
    _batch: weakref.ref[BatchHandle] | None = None  # once a graph has seen it
    _graph_count: int = 0

    def note_batch(self, handle: BatchHandle) -> None:
        self._batch = weakref.ref(handle)

    @property
    def batch(self) -> BatchHandle | None:
        return None if self._batch is None else self._batch()

    def note_inputs(
        self, knows_batch: bool, has_stranger: Callable[[], bool], *, follows_calls: bool
    ) -> None:
        """Notes the inputs of a graph. Later graphs of a call have results of the earlier ones, so
        only the first tells how the program made its inputs; `has_stranger` is asked for it
        alone."""
        if knows_batch:
            self.is_foreign = False
        self.follows_calls |= follows_calls
        if self._graph_count == 0:
            self.has_stranger = has_stranger()
        self._graph_count += 1

    @property
    def moves(self) -> bool:
        """Whether a graph that ran has work that moved to the workers."""
        return any(plan.moved for plan in self.plans)


class PlanHost(Protocol):
    """The part of a loader that shows plans."""

    def _show_plan(self, plan: Plan | None) -> None: ...


class CutHost(PlanHost, PrefixHost, Protocol):
    """The part of the loader that a cut needs."""

    _load_meter: LoadMeter | None

    def _link(self) -> Link | None: ...


@dataclass
class CutContext:
    """The state of one offloaded model. Confined to the training thread."""

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


class ShownPlan:
    """The plan that a loader shows for one offloaded model, and its log lines. Confined to the
    training thread."""

    def __init__(
        self, name: str, user: int, host: Callable[[], PlanHost | None], use: LoaderUse
    ) -> None:
        """``name`` is the offloaded model's for people, ``user`` the id of its context."""
        self._name = name
        self._user = user
        self._host = host
        self._use = use
        self._is_told = False  # that something moves
        self._reasons: set[str] = set()  # refusals that were logged
        self._calls_by_rows: Counter[int | None] = Counter()  # of their batches
        self._made_of: list[Plan] = []  # the plans of the graphs of one call

    @property
    def is_one_graph(self) -> bool:
        """Whether the last calls ran as one captured graph, as far as they knew the batch."""
        return len(self._made_of) <= 1

    def note_call(self, call: ModelCall) -> None:
        """To be called after each call of the model: its plan is that of all graphs that ran."""
        if call.plans and self._is_of_usual_batch(call) and not self._is_made_of(call.plans):
            self._made_of = call.plans
            self.publish(joined(call.plans))

    def _is_made_of(self, plans: list[Plan]) -> bool:
        shown = self._made_of
        return len(shown) == len(plans) and all(map(_are_same, shown, plans))

    def _is_of_usual_batch(self, call: ModelCall) -> bool:
        """Whether most calls so far were given batches of as many rows as this one's.

        The last batch of an epoch is often smaller, and its plan would hide the one of all others.
        """
        rows = None if call.batch is None else call.batch.rows
        self._calls_by_rows[rows] += 1
        return self._calls_by_rows[rows] >= max(self._calls_by_rows.values())

    def publish(self, plan: Plan) -> None:
        """Makes `plan` the model's plan in force. A refusal never hides a plan that moves
        something."""
        shown = self._use.plan_of(self._user)
        if plan.refused is None or shown is None or shown.refused is not None:
            self.show(plan)
        if plan.moved and not self._is_told:
            self._is_told = True
            logger.info("penstock: %s print(loader.plan) shows which", verdict(plan))

    def refuse(self, reason: str) -> None:
        """Notes that a captured graph stays whole."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.warning("penstock: nothing of %s moves to the workers: %s", self._name, reason)
        self.publish(Plan(refused=reason))

    def note_idle(self, reason: str) -> None:
        """Notes that no graph runs any more, so that no plan is in force."""
        self._made_of = []
        self.show(None)
        self.refuse(reason)

    def show(self, plan: Plan | None) -> None:
        """Makes the loader's plan that of all of its models, of which this one has `plan`."""
        plan_of_all = self._use.set_plan(self._user, plan)
        host = self._host()
        if host is not None:
            host._show_plan(plan_of_all)


def _are_same(a: Plan, b: Plan) -> bool:
    return a is b


class ShipmentHost(Protocol):
    """The part of a loader that tells workers what to send."""

    def _set_shipment(self, message: bytes | None) -> None: ...

    def _link(self) -> Link | None: ...


class LeafWithholding:
    """Has leaves of a pool's batches stay with the workers of one loader, whatever models are
    offloaded to it. Confined to the training thread.

    Which leaves, and when, is decided in ``csrc/loader/leaf_withholding.h``. While the program is
    watched, the leaves in question are given out as lazy tensors that have their values, which
    notice when they are read.
    """

    def __init__(
        self, host: Callable[[], ShipmentHost | None], changed: Callable[[], None]
    ) -> None:
        """`changed` is called when batches begin to carry other leaves than before."""
        self.lazy_leaves: Set[int] = frozenset()
        self._host = host
        self._changed = changed
        self._native = _C.LeafWithholding()

    def take(self, user: int, verify_every: int) -> None:
        """Notes an offloaded model, whose results are compared for one batch in `verify_every`."""
        self._native.take(user, verify_every)

    def forget(self, user: int) -> None:
        """Notes that a model is offloaded no more."""
        self._obey(self._native.forget(user))

    def note_call(self, user: int, batch: BatchHandle | None, cuts: Sequence[UsedCut]) -> None:
        """To be called after each call of a model, whose graphs ran with these cuts."""
        if batch is None or self._native.is_withholding or not self._is_possible():
            self._native.note_call(user, None, [])
            return
        seen = (batch.leaf_bytes, batch.read_leaves, batch.is_watched)
        self._obey(self._native.note_call(user, seen, cuts))

    def send_whole(self) -> None:
        """Has batches come whole from the next on that is asked for, and watches the program anew:
        a plan has changed."""
        self._obey(self._native.send_whole())

    def note_recall(self, leaf: int) -> None:
        """A leaf that had stayed with its worker was read."""
        order = self._native.note_recall(leaf)
        if order is not None:
            logger.info("penstock: tensor %d of the batch is read time and again; it is sent", leaf)
        self._obey(order)

    def _is_possible(self) -> bool:
        host = self._host()
        link = None if host is None else host._link()
        return link is not None and not link.sends_whole

    def _obey(self, order: _C.ShipmentOrder | None) -> None:
        self.lazy_leaves = self._native.watched_leaves
        if order is None:
            return
        host = self._host()
        if host is not None:
            host._set_shipment(order.message)
        self._changed()
        if order.message is not None:
            logger.debug("leaves %s stay with the workers", sorted(self.lazy_leaves))
