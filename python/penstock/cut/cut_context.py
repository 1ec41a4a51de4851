# SPDX-License-Identifier: Apache-2.0
"""The state that the captured graphs of one offloaded model share."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from penstock.cut.compiled_prefixes import CompiledPrefixes
from penstock.cut.unused_cuts import UnusedCuts
from penstock.graph.compiled_library import Library
from penstock.graph.plan import Plan, joined
from penstock.graph.plan_table import verdict
from penstock.graph.planning import CutOptions, PlannedCut
from penstock.tracking.batch_origin import BatchHandle, ProvenanceTable
from penstock.tracking.lazy_batches import LazyBatches

if TYPE_CHECKING:
    from penstock.cut.known_ids import KnownIds
    from penstock.cut.repricing import Repricer
    from penstock.tuning.load_meter import LoadMeter

logger = logging.getLogger(__name__)

# After so many calls in a row without a batch of the loader, the plan says so.
FOREIGN_CALLS_MAX = 16
# How many calls may go back to the trainer one after the other before all do.
MISTRUSTS_MAX = 4


class PrefixHost(Protocol):
    """The part of the loader that a cut needs."""

    _plan: Plan | None
    _load_meter: LoadMeter | None

    def _install_prefix(
        self, prefix: str, constants: list[torch.Tensor], seed: int, library: Library
    ) -> None: ...

    def _remove_prefixes(self, prefixes: set[str]) -> None: ...


@dataclass
class CutContext:
    """The state that the graphs of one offloaded model share."""

    target: Any  # the model, or the function that stands for a training step
    host: weakref.ref[PrefixHost]
    provenance: ProvenanceTable
    options: CutOptions
    verify_every: int
    is_open: bool = True  # False once cutting was given up
    installed: set[str] = field(default_factory=set)
    repricer: Repricer | None = None  # with cut="auto", while nothing random may move
    _is_told: bool = False  # that something moves
    _calls_by_rows: Counter[int | None] = field(default_factory=Counter)  # of their batches
    known_ids: list[KnownIds] = field(default_factory=list)  # by cut that is in use
    foreign_calls: int = 0  # since the last call with a tensor of the loader
    reasons: set[str] = field(default_factory=set)  # refusals that were logged
    mistrusts: int = 0  # how often a worker was found to be wrong
    is_foreign: bool = True  # no tensor of the loader was seen in this call so far
    has_written: bool = False  # a tensor of the batch was given that was written to before
    has_stranger: bool = False  # the program may have made an input of this call of the batch
    follows_calls: bool = False  # it has, and it is known how
    lazy: LazyBatches = field(init=False)
    unused: UnusedCuts = field(default_factory=UnusedCuts)
    compiler: CompiledPrefixes | None = None  # if prefixes are to be compiled
    batch: weakref.ref[BatchHandle] | None = None  # of this call, once a graph has seen it
    call_weight: int = 1  # how many calls this one stands for, the others being like it
    has_planned: bool = False  # in this call
    _captured_count: int = 0  # graphs
    _graph_count: int = 0  # of this call so far
    _plans: list[Plan] = field(default_factory=list)  # of the graphs that ran in this call
    _shown: list[Plan] = field(default_factory=list)  # what the loader's plan was made of

    def __post_init__(self) -> None:
        self.lazy = LazyBatches(self.provenance)

    def compile_prefixes(self) -> None:
        """Has prefixes compiled from now on."""
        self.compiler = CompiledPrefixes(self._send)

    def buffers(self) -> Iterator[torch.Tensor]:
        """Tensors that are the model's own, wherever in its forward they are met."""
        for module in modules_of(self.target):
            yield from module.buffers()

    def options_of_graph(self) -> CutOptions:
        """To be called for each captured graph: the options, and a name for its draws."""
        self._captured_count += 1
        name = f"{self.options.draws_of}.{self._captured_count}"
        return replace(self.options, draws_of=name)

    def begin_call(self) -> None:
        """To be called before the model runs."""
        self.is_foreign = True
        self.has_stranger = self.follows_calls = self.has_written = False
        self._graph_count = 0
        self._plans = []
        self.batch = None
        self.has_planned = False

    def note_inputs(
        self, knows_batch: bool, has_stranger: Callable[[], bool], *, follows_calls: bool
    ) -> None:
        """Notes what a graph was given. Later graphs of a call have results of the earlier ones,
        so only the first says what the program did before."""
        if knows_batch:
            self.is_foreign = False
        self.follows_calls |= follows_calls
        if self._graph_count == 0 and self.lazy.is_undecided:
            self.has_stranger = has_stranger()
        self._graph_count += 1

    @property
    def is_still(self) -> bool:
        """Whether this call has neither moved nor planned anything."""
        return not self.has_planned and not any(plan.moved for plan in self._plans)

    @property
    def is_one_graph(self) -> bool:
        """Whether the last calls ran as one captured graph, as far as they knew the batch."""
        return len(self._shown) <= 1

    def note_plan(self, plan: Plan) -> None:
        """Notes the plan of a graph that runs in this call."""
        self._plans.append(plan)

    def end_call(self, has_run_graph: bool) -> None:
        """To be called after the model ran: its plan is that of all graphs that did."""
        if has_run_graph:
            self._note_foreign()
            moves = any(plan.moved for plan in self._plans)
            self.lazy.note_call(self.has_stranger, self.follows_calls, moves)
            self._withdraw_unused()
        if self.is_open and self._plans and self._is_of_usual_batch():
            if _are_same(self._plans, self._shown):
                return
            self._shown = self._plans
            self.publish(joined(self._plans))

    def _is_of_usual_batch(self) -> bool:
        """Whether most calls so far were given batches of as many rows as this one's.

        The last batch of an epoch is often smaller, and its plan would hide the one of all others.
        """
        handle = self.batch() if self.batch is not None else None
        rows = None if handle is None else handle.rows
        self._calls_by_rows[rows] += 1
        return self._calls_by_rows[rows] >= max(self._calls_by_rows.values())

    def install(self, cut: PlannedCut) -> None:
        if cut.prefix not in self.installed:
            self.installed.add(cut.prefix)
            if self.provenance.use.take_prefix(id(self), cut.prefix):
                self._send(cut)

    def _send(self, cut: PlannedCut) -> None:
        """Gives workers a prefix, or what was compiled of one that they have."""
        host = self.host()
        if host is not None and cut.prefix in self.installed:
            library = Library() if self.compiler is None else self.compiler.library_of(cut.prefix)
            host._install_prefix(cut.prefix, list(cut.prefix_constants), cut.seed, library)

    def withdraw(self, cut: PlannedCut) -> None:
        """Notes that a cut is in use no more. The workers stop running its prefix, unless another
        that is in use has the same."""
        self.known_ids[:] = [known for known in self.known_ids if known.planned is not cut]
        if all(known.planned.prefix != cut.prefix for known in self.known_ids):
            self._withdraw_prefixes({cut.prefix})

    def _withdraw_unused(self) -> None:
        handle = self.batch() if self.batch is not None else None
        if handle is None or not self.is_open:
            return
        if self.unused.end_call(handle.boundary.keys()):
            self._withdraw_prefixes(self.unused.orphans(self.installed))

    def _withdraw_prefixes(self, prefixes: Set[str]) -> None:
        """Makes the workers stop running those of them that they were given."""
        host, given = self.host(), self.installed & prefixes
        if host is not None and given:
            unused = self.provenance.use.drop_prefixes(id(self), given)
            if unused:
                host._remove_prefixes(unused)
            self.installed -= given
            self.known_ids[:] = [
                known for known in self.known_ids if known.planned.prefix not in given
            ]

    def mistrust(self, operators: Sequence[str], message: str) -> None:
        """Notes that workers were wrong about `operators`: what else they make is compared anew."""
        logger.warning("penstock: %s", message)
        self.mistrusts += 1
        if self.mistrusts > MISTRUSTS_MAX:
            self.give_up(
                f"the workers' results of {', '.join(operators)} and of {MISTRUSTS_MAX} calls "
                "before differed from the trainer's own"
            )

    def refuse_graph(self, reason: str) -> None:
        """Notes that one captured graph stays whole."""
        if reason not in self.reasons:
            self.reasons.add(reason)
            logger.warning("penstock: nothing of this model moves to the workers: %s", reason)
        self.publish(Plan(refused=reason))

    def note_idle(self, reason: str) -> None:
        """Notes that no graph runs any more, so that no plan is in force."""
        self._shown = []
        self._show(None)
        self.refuse_graph(reason)

    def _note_foreign(self) -> None:
        """Counts calls without any tensor of the loader, so that a cut that never comes has a
        reason."""
        self.foreign_calls = self.foreign_calls + 1 if self.is_foreign else 0
        if self.foreign_calls == FOREIGN_CALLS_MAX and self.has_written:
            self.refuse_graph(
                f"{FOREIGN_CALLS_MAX} calls in a row were given a tensor of the batch that was "
                "written to in place before (x.clamp_(), x /= 255), and the workers' results are "
                "those of the batch as it came; make another tensor of it (x = x.clamp(), "
                "x = x / 255), or offload a function that does it and calls the model"
            )
        elif self.foreign_calls == FOREIGN_CALLS_MAX:
            self.refuse_graph(
                f"{FOREIGN_CALLS_MAX} calls in a row were given no tensor of the batch, and nothing"
                " that follows from one by operators that can be followed (random ones, indexing "
                "and other libraries cannot; offload a function that does it and calls the model, "
                "or leave it to the dataset)"
            )

    def publish(self, plan: Plan) -> None:
        """Makes `plan` the loader's plan in force. A refusal never hides a plan that moves
        something."""
        shown = self.provenance.use.plan_of(id(self))
        if plan.refused is None or shown is None or shown.refused is not None:
            self._show(plan)
        if plan.moved and not self._is_told:
            self._is_told = True
            logger.info("penstock: %s print(loader.plan) shows which", verdict(plan))

    def _show(self, plan: Plan | None) -> None:
        """Makes the loader's plan that of all of its models, of which this one has `plan`."""
        plan_of_all = self.provenance.use.set_plan(id(self), plan)
        host = self.host()
        if host is not None:
            host._plan = plan_of_all

    def give_up(self, reason: str) -> None:
        """Stops cutting for good; training goes on with whole graphs."""
        if self.is_open:
            logger.warning("penstock: %s; the whole model runs in the trainer from here on", reason)
            self.close(Plan(refused=reason))

    def close(self, plan: Plan | None = None) -> None:
        """Stops cutting and withdraws what the workers run; `plan` is what the loader shows
        then."""
        self.is_open = False
        self.lazy.give_up()
        if self.compiler is not None:
            self.compiler.close()
        self.known_ids.clear()
        self._withdraw_prefixes(self.installed)
        self._show(plan)
        host = self.host()
        if self.provenance.use.drop_meter(id(self)) and host is not None:
            host._load_meter = None  # from the next epoch on nothing is measured


def modules_of(target: Any) -> Iterator[torch.nn.Module]:
    """The model itself, or the models that a function can name: what it is bound to, closes over,
    or finds among its globals."""
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


def _are_same(a: list[Plan], b: list[Plan]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
