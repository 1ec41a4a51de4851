# SPDX-License-Identifier: Apache-2.0
"""Hold the state that the captured graphs of one offloaded model share.

`CutContext` has it: the current call (`ModelCall`), the plan that the loader shows (`ShownPlan`),
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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock import _C
from penstock.cut.installed_prefixes import InstalledPrefixes
from penstock.graph.plan import Plan, joined
from penstock.graph.plan_text import verdict
from penstock.graph.planning import CutOptions
from penstock.loader.loader_run import LoaderRun
from penstock.program_line import program_line
from penstock.tracking.batch_origin import BatchHandle, ProvenanceTable
from penstock.tracking.lazy_batches import LazyBatches
from penstock.tracking.loader_use import LoaderUse

if TYPE_CHECKING:
    from penstock.cut.repricing import Repricer

logger = logging.getLogger(__name__)

# After this many calls in a row without a batch of the loader, the plan reports this.
FOREIGN_CALLS_MAX = 16
# Limit of calls that return to the trainer one after another before all of them do.
MISMATCHES_MAX = 4


class UsedCut(NamedTuple):
    """The cut of one graph that ran: the leaves that the trainer reads, and the boundary tensors.

    The boundary tensors replace the other leaves.
    """

    raw_leaves: frozenset[int]
    keys: frozenset[str]  # empty if all calls stay
    is_settled: bool  # it was compared, and is not being timed


@dataclass
class ModelCall:
    """One call, which may run several captured graphs. Confined to the training thread."""

    is_foreign: bool = True  # no tensor of the loader was seen so far
    has_written: bool = False  # an input is a tensor of the batch that was written to before
    has_unknown_input: bool = False  # the program may have made an input from the batch
    follows_calls: bool = False  # it has, by known operators
    has_planned: bool = False
    plans: list[Plan] = field(default_factory=list)  # plans of the graphs that ran
    cuts: list[UsedCut] = field(default_factory=list)  # cuts of the graphs that ran
    _batch: weakref.ref[BatchHandle] | None = None  # set when a graph has seen it
    _graph_count: int = 0

    def note_batch(self, handle: BatchHandle) -> None:
        self._batch = weakref.ref(handle)

    @property
    def batch(self) -> BatchHandle | None:
        return None if self._batch is None else self._batch()

    def note_inputs(
        self, knows_batch: bool, has_unknown_input: Callable[[], bool], *, follows_calls: bool
    ) -> None:
        """Note the inputs of a graph.

        Later graphs of a call take results of the earlier ones, so only the first graph shows how
        the program made its inputs; `has_unknown_input` is called for it only.
        """
        if knows_batch:
            self.is_foreign = False
        self.follows_calls |= follows_calls
        if self._graph_count == 0:
            self.has_unknown_input = has_unknown_input()
        self._graph_count += 1

    @property
    def moves(self) -> bool:
        """Return whether calls of a graph that ran moved to the workers."""
        return any(plan.moved for plan in self.plans)


@dataclass
class CutContext:
    """The state of one offloaded model. Confined to the training thread."""

    target: Any  # the model, or a function such as a training step; held weakly
    host: weakref.ref[LoaderRun]
    provenance: ProvenanceTable
    options: CutOptions
    verify_every: int
    name: str = ""  # the model's name for users
    user: int = field(init=False)  # number of the offloaded model at its loader
    is_open: bool = True  # False after cutting was given up
    repricer: Repricer | None = None  # with cut="auto", while no random draw may move
    mismatches: int = 0  # how often a worker was found to be wrong
    call_weight: int = 1  # number of similar calls that this one represents
    withholding: LeafWithholding | None = None  # of the loader, if leaves may stay with workers
    call: ModelCall = field(default_factory=ModelCall)  # the current or last call
    lazy: LazyBatches = field(init=False)
    plan: ShownPlan = field(init=False)
    prefixes: InstalledPrefixes = field(init=False)
    _foreign_calls: int = 0  # calls since the last one with a tensor of the loader
    _captured_count: int = 0  # number of graphs

    def __post_init__(self) -> None:
        self.name = self.name or format_model(self.target)
        self.target = weakly(self.target)
        self.user = self.provenance.use.new_user()
        self.lazy = LazyBatches(self.provenance, self.user)
        self.plan = ShownPlan(self.name, self.user, self.host, self.provenance.use)
        self.prefixes = InstalledPrefixes(self.user, self.host, self.provenance.use)

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield the buffers of the model, wherever its forward reads them."""
        for module in modules_of(self.target()):
            yield from module.buffers()

    def options_of_graph(self) -> CutOptions:
        """Return the options and a name for the draws; call once for each captured graph."""
        self._captured_count += 1
        name = f"{self.options.draws_of}.{self._captured_count}"
        return replace(self.options, draws_of=name)

    def with_link(self, options: CutOptions) -> CutOptions:
        """Return the options with the present link to the workers."""
        host = self.host()
        link = None if host is None else host.link
        if link is not None and self.withholding is None:
            link = link._replace(sends_whole=True)
        return replace(options, link=link)

    def begin_call(self) -> None:
        """Start a call; call before the model runs."""
        self.call = ModelCall()
        self.provenance.use.note_call(self.user, self.name)

    def end_call(self, has_run_graph: bool) -> None:
        """End a call; call after the model ran."""
        call = self.call
        if has_run_graph:
            self._note_foreign()
            self.lazy.note_call(call.has_unknown_input, call.follows_calls, call.moves)
            if self.is_open:
                self.prefixes.note_call(call.batch)
            if self.is_open and self.withholding is not None:
                self.withholding.note_call(self.user, call.batch, call.cuts)
        if self.is_open:
            self.plan.note_call(call)

    def note_mismatch(self, operators: Sequence[str], message: str) -> None:
        """Note that workers were wrong about `operators`: compare their other results again."""
        logger.warning("penstock: %s", message)
        self.mismatches += 1
        if self.mismatches > MISMATCHES_MAX:
            self.give_up(
                f"the workers' results of {', '.join(operators)} and of {MISMATCHES_MAX} earlier "
                "calls differed from the trainer's results"
            )

    def _note_foreign(self) -> None:
        """Count calls without any tensor of the loader, to report why no cut is ever made."""
        if self.lazy.is_sampling:
            return  # by design, most calls see no lazy tensors of their batches
        self._foreign_calls = self._foreign_calls + 1 if self.call.is_foreign else 0
        if self._foreign_calls == FOREIGN_CALLS_MAX and self.call.has_written:
            self.plan.refuse(
                f"{FOREIGN_CALLS_MAX} calls in a row were given a tensor of the batch that the "
                "program had modified in place (x.clamp_(), x /= 255), but the workers compute "
                "with the original values; make a new tensor (x = x.clamp(), x = x / 255), or "
                "offload a function that modifies the tensor and calls the model"
            )
        elif self._foreign_calls == FOREIGN_CALLS_MAX:
            self.plan.refuse(
                f"{FOREIGN_CALLS_MAX} calls in a row were given no tensor of the batch, and none "
                "computed from one by operators that can be tracked (random operators, indexing "
                "and other libraries cannot be); offload a function that does this and calls the "
                "model, or do it in the dataset"
            )

    def give_up(self, reason: str) -> None:
        """Stop cutting for good; training continues with whole graphs."""
        if self.is_open:
            logger.warning(
                "penstock: %s; the whole of %s runs in the trainer from now on", reason, self.name
            )
            self.close(Plan(refused=reason))

    def close(self, plan: Plan | None = None) -> None:
        """Stop cutting and withdraw the workers' prefixes; the loader then shows `plan`."""
        self.is_open = False
        self.lazy.give_up()
        self.prefixes.close()
        forget_user(self.user, self.host, self.provenance)
        if plan is not None:
            self.plan.show(plan)


def forget_user(
    user: int, host: Callable[[], LoaderRun | None], provenance: ProvenanceTable
) -> None:
    """Free a loader's data of an offloaded model that was detached or deleted."""
    if provenance.deferral is not None:
        provenance.deferral.forget_user(user)
    if provenance.withholding is not None:
        provenance.withholding.forget(user)
    run = host()
    unused = provenance.use.drop_prefixes_of(user)
    plan = provenance.use.set_plan(user, None)
    needs_no_meter = provenance.use.drop_meter(user)
    if run is None:
        return
    if unused:
        run.remove_prefixes(unused)
    run.show_plan(plan)
    if needs_no_meter:
        run.load_meter = None  # no measurements from the next epoch on


def weakly(target: Any) -> Callable[[], Any]:
    """Return a reference to a model or a function that does not keep it alive."""
    try:
        return weakref.WeakMethod(target) if inspect.ismethod(target) else weakref.ref(target)
    except TypeError:  # a callable object without weak references
        return lambda: target


def format_model(model: Any) -> str:
    """Return the model's class, or a function's name, and the program line that offloads it."""
    name = type(model).__name__
    if not isinstance(model, torch.nn.Module):
        name = getattr(model, "__name__", name)
    line = program_line()
    return f"{name}, offloaded at {line}," if line else name


def modules_of(target: Any) -> Iterator[torch.nn.Module]:
    """Yield the model itself, or the models that a function can name.

    These are the object that it is bound to, the models in its closure, and the models among its
    globals.
    """
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
    """The plan that a loader shows for one offloaded model, and its log lines.

    Confined to the training thread.
    """

    def __init__(
        self, name: str, user: int, host: Callable[[], LoaderRun | None], use: LoaderUse
    ) -> None:
        """``name`` is the offloaded model's name for users, ``user`` the id of its context."""
        self._name = name
        self._user = user
        self._host = host
        self._use = use
        self._is_logged = False  # whether the log has reported that calls move
        self._reasons: set[str] = set()  # refusals that were logged
        self._calls_by_rows: Counter[int | None] = Counter()  # by the rows of their batches
        self._made_of: list[Plan] = []  # the plans of the graphs of one call

    @property
    def is_one_graph(self) -> bool:
        """Return whether the last calls ran as one captured graph, if they knew the batch."""
        return len(self._made_of) <= 1

    def note_call(self, call: ModelCall) -> None:
        """Show the joined plan of all graphs that ran; call after each call of the model."""
        if call.plans and self._has_usual_row_count(call) and not self._is_made_of(call.plans):
            self._made_of = call.plans
            self.publish(joined(call.plans))

    def _is_made_of(self, plans: list[Plan]) -> bool:
        shown = self._made_of
        return len(shown) == len(plans) and all(map(_are_same, shown, plans))

    def _has_usual_row_count(self, call: ModelCall) -> bool:
        """Return whether this call's batch has the number of rows that most calls had so far.

        The last batch of an epoch is often smaller, and its plan would hide the plan of all others.
        """
        rows = None if call.batch is None else call.batch.rows
        self._calls_by_rows[rows] += 1
        return self._calls_by_rows[rows] >= max(self._calls_by_rows.values())

    def publish(self, plan: Plan) -> None:
        """Make `plan` the model's plan in force. A refusal never hides a plan that moves calls."""
        shown = self._use.plan_of(self._user)
        if plan.refused is None or shown is None or shown.refused is not None:
            self.show(plan)
        if plan.moved and not self._is_logged:
            self._is_logged = True
            logger.info("penstock: %s print(loader.plan) shows which", verdict(plan))

    def refuse(self, reason: str) -> None:
        """Note that a captured graph stays whole."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.warning("penstock: no call of %s moves to the workers: %s", self._name, reason)
        self.publish(Plan(refused=reason))

    def note_idle(self, reason: str) -> None:
        """Note that no graph runs any more, so that no plan is in force."""
        self._made_of = []
        self.show(None)
        self.refuse(reason)

    def show(self, plan: Plan | None) -> None:
        """Set this model's `plan` and show the loader's plan, which covers all of its models."""
        plan_of_all = self._use.set_plan(self._user, plan)
        host = self._host()
        if host is not None:
            host.show_plan(plan_of_all)


def _are_same(a: Plan, b: Plan) -> bool:
    return a is b


class LeafWithholding:
    """Lets leaves of a pool's batches stay with the workers of one loader.

    It covers all models that are offloaded to the loader. Confined to the training thread.

    ``csrc/pool_client/leaf_withholding.h`` decides when, and for which leaves. While the program is
    watched, the program receives these leaves as lazy tensors that have their values and record
    reads.
    """

    def __init__(self, host: Callable[[], LoaderRun | None], changed: Callable[[], None]) -> None:
        """`changed` is called when batches start to carry other leaves than before."""
        self.lazy_leaves: Set[int] = frozenset()
        self._host = host
        self._changed = changed
        self._native = _C.LeafWithholding()

    def take(self, user: int, verify_every: int) -> None:
        """Note an offloaded model, whose results are compared for one batch in `verify_every`."""
        self._native.take(user, verify_every)

    def forget(self, user: int) -> None:
        """Note that a model is no longer offloaded."""
        self._apply(self._native.forget(user))

    def note_call(self, user: int, batch: BatchHandle | None, cuts: Sequence[UsedCut]) -> None:
        """Note a model call, whose graphs ran with these cuts; call after each call of a model."""
        if batch is None or self._native.is_withholding or not self._is_possible():
            self._native.note_call(user, None, [])
            return
        seen = (batch.leaf_bytes, batch.read_leaves, batch.is_watched)
        self._apply(self._native.note_call(user, seen, cuts))

    def send_whole(self) -> None:
        """Request whole batches from the next request on, and watch the program again.

        Call this when a plan has changed.
        """
        self._apply(self._native.send_whole())

    def note_recall(self, leaf: int) -> None:
        """Note that a leaf that had stayed with its worker was read."""
        order = self._native.note_recall(leaf)
        if order is not None:
            logger.info(
                "penstock: tensor %d of the batch is read repeatedly; workers send it", leaf
            )
        self._apply(order)

    def _is_possible(self) -> bool:
        host = self._host()
        link = None if host is None else host.link
        return link is not None and not link.sends_whole

    def _apply(self, order: _C.ShipmentOrder | None) -> None:
        self.lazy_leaves = self._native.watched_leaves
        if order is None:
            return
        host = self._host()
        if host is not None:
            host.set_shipment(order.message)
        self._changed()
        if order.message is not None:
            logger.debug("leaves %s stay with the workers", sorted(self.lazy_leaves))
