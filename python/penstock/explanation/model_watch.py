# SPDX-License-Identifier: Apache-2.0
"""Find the model of a program that does not name it.

It is the first module with parameters that is called with a tensor of a loader's batch.

Two places are watched while the program runs: torch's base iterator, through which every batch of
every loader passes, and the call of `nn.Module`, where the outermost module is seen first. A
forward pre-hook for all modules would not work: it sees no keyword arguments, and Dynamo compiles
it into the models.

If a model is called with other tensors, the program may have made them from the batch. Batches are
then delivered as lazy tensors, which record how those were made (`penstock.tracking.lazy_tensor`).
`SeenCalls` describes a program whose model was not found.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.compat.dynamo import OptimizedModule, module_under
from penstock.compat.iterators import BaseIterator
from penstock.compat.modules import COMPILED_CALL, Patch
from penstock.compat.operators import tree_map_only
from penstock.compat.storages import write_count
from penstock.graph.plan import Plan
from penstock.images.sample_plan import sample_text
from penstock.tracking.batch_origin import BatchHandle, Provenance, ProvenanceTable
from penstock.tracking.deferral import Deferral
from penstock.tracking.lazy_tensor import LazyTensor, is_written, plain
from penstock.tracking.leaves import flatten_batch

if TYPE_CHECKING:
    from penstock.cut.offloaded_call import OffloadedCall
    from penstock.cut.script_models import OffloadedScript
    from penstock.graph.planning import CutMode

# Worker count for pricing a plan if the loader has no workers.
WORKER_COUNT_GUESS = 2
# This many batches are lazy before a call is accepted unchanged: a constant of the program is
# recognised when a second batch is used with it.
FOLLOWED_BATCHES_MIN = 2
TENSORS_SHOWN_MAX = 3
OUTSIDE_OF_PROGRAMS = tuple(
    os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep
    for module in (torch, sys.modules["penstock"])
)

# Interrupts the main thread. SIGINT would not if a shell ignores it or a program handles it.
_STOP_SIGNAL = signal.SIGRTMAX - 3

# After this many batches for which a model was called, but with other tensors, the search ends.
FOREIGN_BATCHES_MAX = 16
MODELS_SHOWN_MAX = 3


class ProgramStopped(SystemExit):
    """Ends the program after the search. A SystemExit, since it ends a thread without a message."""


@dataclass(frozen=True, slots=True)
class FoundPlan:
    plan: Plan
    subject: str  # the model, with the line and arguments of its call


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor of a batch as it was delivered."""

    batch_number: int
    index: int
    version: int | None
    leaf_count: int
    worker_count: int
    link: Any  # to a pool's workers, a `penstock.graph.link.Link`; None on one machine
    dataset: Any = None


class _Place(Enum):
    OUTSIDE = auto()  # outside of all models
    IN_MODEL = auto()  # in a model that was seen
    IN_FOUND = auto()  # in the model looked for, which is to be called again


class ModelWatch:
    """A context in which the program runs, which is stopped once the model is found.

    It ends the program with ProgramStopped when `found` is set, or when no suitable call can follow
    any more. The patches stay in force for the code that catches the exception.

    `report` is called with the findings before the program is stopped, since stopping may take any
    time; `end` calls it if the program ended earlier. The program may call from any thread;
    processes that it starts are not watched.
    """

    def __init__(self, cut: CutMode | None, report: Callable[[FoundPlan], None]) -> None:
        self.found: FoundPlan | None = None
        self.is_stopped = False
        self.seen = SeenCalls()
        self._report = report
        self._cut = cut  # None: as in the program's offload, or "auto" without one
        self._pid = os.getpid()
        self._patches: list[Patch] = []
        self._leaves: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._followed = ProvenanceTable()
        self._followed_batches = 0
        self._first_found: FoundPlan | None = None  # may not cover all batch-dependent tensors
        self._is_offloaded = False  # whether the program has offloaded a part of a model
        self._thread = threading.local()  # its `place`: a _Place, set when a module was called
        self._stance: Any = None

    def __enter__(self) -> ModelWatch:
        if threading.current_thread() is threading.main_thread():
            signal.signal(_STOP_SIGNAL, signal.default_int_handler)
        watch = self

        def watched(call: Any) -> Any:
            def watched_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
                # If the program compiles nevertheless, there are no tensors to identify.
                if torch.compiler.is_compiling() or os.getpid() != watch._pid:
                    return call(self, *args, **kwargs)
                place = watch._enter_call(self, args, kwargs)
                try:
                    return call(self, *args, **kwargs)
                finally:
                    watch._thread.place = place

            return watched_call

        def followed(advance: Any) -> Any:
            def watched_next(self: Any) -> Any:
                batch = advance(self)
                return watch._delivered(self, batch) if os.getpid() == watch._pid else batch

            return watched_next

        # Compiled functions do not call modules inside of them, unless they run uncompiled.
        self._stance = torch.compiler.set_stance("force_eager")
        self._patches = [
            Patch(torch.nn.Module, "__call__", watched),
            Patch(BaseIterator, "__next__", followed),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._unpatch()

    def end(self) -> None:
        """Report the first findings, if any; call when the program has ended by itself."""
        if self.found is None and self._first_found is not None:
            self._take(self._first_found)

    def _delivered(self, iterator: Any, batch: Any) -> Any:
        """Note a batch; return the object that the program receives for it."""
        if self.is_stopped:
            raise ProgramStopped(0)
        leaves = [_own(leaf) for leaf in tensors_in(batch)]
        self.seen.batch_count += 1
        worker_count = int(getattr(iterator, "_num_workers", 0) or 0)
        link = getattr(iterator, "link", None)
        for index, leaf in enumerate(leaves):
            self._leaves[leaf] = _Leaf(
                self.seen.batch_count,
                index,
                version_of(leaf),
                len(leaves),
                worker_count,
                link,
                getattr(iterator, "_dataset", None),
            )
        if self._followed.deferral is None:
            return batch
        self._followed_batches += 1
        handle = BatchHandle(len(leaves))
        for index, leaf in enumerate(leaves):
            if not leaf.is_inference() and self._followed.lookup(leaf) is None:
                self._followed.record(leaf, Provenance(handle, index, write_count(leaf)))
        return self._followed.deferral.delivered(batch, handle, leaves)

    def _follow(self) -> None:
        """Deliver lazy batches from the next on."""
        if self._followed.deferral is None:
            self._followed.deferral = Deferral(self._followed)
            self._followed.deferral.wanted_by.add(0)  # a number that no model has

    def _enter_call(
        self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Place:
        """Note a module call; call before it. Return the former place of this thread."""
        place: _Place = getattr(self._thread, "place", _Place.OUTSIDE)
        if place is not _Place.IN_FOUND:
            inside = self._note_call(module, args, kwargs, place is _Place.OUTSIDE)
            self._thread.place = place if inside is _Place.OUTSIDE else inside
        return place

    def _note_call(
        self,
        module: torch.nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        is_outermost: bool,
    ) -> _Place:
        """Stop the program if this is the call that is looked for.

        Return the place of the calls inside this one: OUTSIDE if one of them may be the outermost
        call of a model.
        """
        if self.is_stopped:
            raise ProgramStopped(0)
        tensors = tensors_in((args, kwargs))
        if not self.seen.batch_count or not tensors:
            return _Place.IN_MODEL
        known = [self._leaf(tensor) or self._leaf_behind(tensor) for tensor in tensors]
        leaf = next((found for found in known if found is not None), None)
        if leaf is None and not is_outermost:
            return _Place.IN_MODEL
        if next(module.parameters(), None) is None:
            if leaf is not None:  # a loss, or a transform
                self.seen.note_without_parameters(name_of(module))
            return _Place.IN_MODEL
        offloaded = offloaded_call(module)
        if offloaded is None and self._holds_offloaded(module):
            return _Place.OUTSIDE  # the offloaded model is further inside
        if leaf is not None and (offloaded is not None or not self._is_offloaded):
            if None not in known or self._followed_batches >= FOLLOWED_BATCHES_MIN:
                self._take(self._explained(module, args, kwargs, leaf, offloaded))
                self._stop()
            if self._first_found is None:
                self._first_found = self._explained(module, args, kwargs, leaf, offloaded)
            self._follow()
            return _Place.IN_FOUND
        if is_outermost:
            self.seen.note_foreign(name_of(module), self._describe(tensors))
            self._follow()
            if self.seen.is_hopeless:
                self._stop()
        return _Place.IN_MODEL

    def _leaf(self, tensor: torch.Tensor) -> _Leaf | None:
        tensor = _own(tensor)
        leaf: _Leaf | None = self._leaves.get(tensor)
        return leaf if leaf is not None and leaf.version == version_of(tensor) else None

    def _leaf_behind(self, tensor: torch.Tensor) -> _Leaf | None:
        """Return a tensor of the batch that the deferred `tensor` depends on, or None."""
        if not isinstance(tensor, LazyTensor) or tensor._value is None or is_written(tensor):
            return None
        provenance = tensor._value.provenance()
        inputs = provenance.inputs if provenance is not None else ()
        leaves = (self._leaf(each) for each in inputs if isinstance(each, torch.Tensor))
        return next((leaf for leaf in leaves if leaf is not None), None)

    def _holds_offloaded(self, module: torch.nn.Module) -> bool:
        if any(offloaded_call(part) is not None for part in module.modules()):
            self._is_offloaded = True
        return self._is_offloaded

    def _describe(self, tensors: Sequence[torch.Tensor]) -> str:
        shown = [
            f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            + (" of a batch, but modified in place since" if tensor in self._leaves else "")
            for tensor in tensors[:TENSORS_SHOWN_MAX]
        ]
        return ", ".join([*shown, "..."] if len(tensors) > len(shown) else shown)

    def _explained(
        self,
        module: torch.nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        leaf: _Leaf,
        offloaded: OffloadedCall | OffloadedScript | None,
    ) -> FoundPlan:
        from penstock.explanation.explanation import ExplainedCall, explain_call
        from penstock.graph.planning import CutOptions

        model = unwrapped(module)
        asked = offloaded.options if offloaded is not None else None
        options = CutOptions(
            self._cut or (asked.mode if asked is not None else "auto"),
            asked.allow_random if asked is not None else False,
            leaf.worker_count or WORKER_COUNT_GUESS,
            link=leaf.link,
            tolerance=asked.tolerance if asked is not None else None,
        )

        def leaf_index_of(tensor: torch.Tensor) -> int | None:
            found = self._leaf(tensor)
            is_same = found is not None and found.batch_number == leaf.batch_number
            return found.index if found is not None and is_same else None

        tensors = tensors_in((args, kwargs))
        given = sum(leaf_index_of(tensor) is not None for tensor in tensors)
        made = [tensor for tensor in tensors if self._leaf_behind(tensor) is not None]
        followed = _table_of(made[0]) if made else None
        if followed is None:
            args, kwargs = tree_map_only(LazyTensor, plain, (args, kwargs))
        self._unpatch()  # the analysis calls modules, too
        try:
            call = ExplainedCall(args, kwargs, leaf_index_of, leaf.leaf_count)
            try:
                plan = explain_call(model, call, options, followed)
            except Exception as error:  # as in training: planning errors must not end the program
                plan = Plan(refused=f"planning failed: {type(error).__name__}: {error}")
            plan = replace(plan, sample=sample_text(leaf.dataset))
        finally:
            self.__enter__()
        workers = (
            f"loaded by {leaf.worker_count} worker{'s' if leaf.worker_count > 1 else ''}"
            if leaf.worker_count
            else f"loaded without workers (priced as with {WORKER_COUNT_GUESS})"
        )
        more = f", and {len(made)} that the program computed from them, of" if made else " of"
        return FoundPlan(
            plan,
            f"{name_of(module)}, called at {call_site()} in {mode_of(model)} mode with {given} of "
            f"the {leaf.leaf_count} tensors{more} a batch {workers}",
        )

    def _take(self, found: FoundPlan) -> None:
        self.found = found
        self._report(found)

    def _stop(self) -> None:
        self.is_stopped = True
        if threading.current_thread() is not threading.main_thread():
            # The main thread may be waiting for this thread's next result.
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, _STOP_SIGNAL)
        raise ProgramStopped(0)

    def _unpatch(self) -> None:
        self._stance.__exit__(None, None, None)
        for patch in self._patches:
            patch.undo()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch or of arguments.

    Return none if these contain themselves or are half initialised.
    """
    try:
        return flatten_batch(value)
    except (AttributeError, RecursionError):
        return []


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return the batch's tensor if `tensor` is lazy and represents it, otherwise `tensor`."""
    value = tensor._value if isinstance(tensor, LazyTensor) else None
    if value is None or value.tensor is None or not isinstance(value.source, int):
        return tensor
    return value.tensor


def _table_of(tensor: torch.Tensor) -> ProvenanceTable | None:
    value = tensor._value if isinstance(tensor, LazyTensor) else None
    return value.table.provenance if value is not None else None


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the write count of a tensor; None for inference tensors, which have none."""
    return None if tensor.is_inference() else write_count(tensor)


def name_of(module: torch.nn.Module) -> str:
    model = unwrapped(module)
    return str(getattr(model, "original_name", type(model).__name__))  # the name before scripting


def mode_of(module: torch.nn.Module) -> str:
    return "train" if module.training else "eval"


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the user's model inside a wrapper that passes it the same arguments."""
    if isinstance(module, OptimizedModule):
        return unwrapped(module_under(module))
    if isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        return unwrapped(module.module)
    return module


def offloaded_call(module: torch.nn.Module) -> Any:
    if not {COMPILED_CALL, "forward"} & module.__dict__.keys():
        return None
    from penstock.cut import offloading

    return offloading.offloaded_call(module)


def call_site() -> str:
    """Return the line of the program, or of its framework, that is running: `train.py:31`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OUTSIDE_OF_PROGRAMS):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@dataclass
class SeenCalls:
    """Counts batches, and calls of models that were not the one looked for.

    Its text is the reason why none was found.
    """

    batch_count: int = 0
    _foreign: Counter[str] = field(default_factory=Counter)  # calls with other tensors, by model
    _first_tensors: dict[str, str] = field(default_factory=dict)  # tensors of those calls, by model
    _foreign_batches: set[int] = field(default_factory=set)
    _without_parameters: dict[str, None] = field(default_factory=dict)

    def note_without_parameters(self, module: str) -> None:
        """Note that a module that cannot be the model was called with a tensor of a batch."""
        self._without_parameters[module] = None

    def note_foreign(self, model: str, tensors: str) -> None:
        """Note that a model was called with `tensors`, none of them an unchanged batch tensor."""
        self._foreign[model] += 1
        self._first_tensors.setdefault(model, tensors)
        self._foreign_batches.add(self.batch_count)

    @property
    def is_hopeless(self) -> bool:
        return len(self._foreign_batches) >= FOREIGN_BATCHES_MAX

    def __str__(self) -> str:
        """Return one sentence: the calls that were seen, and the remedy."""
        batches = f"{self.batch_count} batch{'es were' if self.batch_count != 1 else ' was'}"
        if not self.batch_count:
            return (
                "no batch was delivered by a DataLoader in the program's main process, and "
                "processes that it starts are not watched; train in the main process"
            )
        if not self._foreign:
            called = ", ".join(self._without_parameters)
            seen = f"only {called} was called, without parameters" if called else "none was called"
            return (
                f"{batches} delivered, but there is no model to explain: {seen}; the program must "
                "call a torch.nn.Module that has parameters with the tensors of a batch"
            )
        calls = "; ".join(
            f"{model} was called {count} time{'s' if count > 1 else ''}, first with "
            f"{self._first_tensors[model]}"
            for model, count in self._foreign.most_common(MODELS_SHOWN_MAX)
        )
        return (
            f"{batches} delivered, but no model was called with a tensor of one, or with a tensor "
            f"computed from one by operators that can be tracked (random operators, indexing and "
            f"other libraries cannot be, nor can the first batch): {calls}; compute it in the "
            "model's forward or in the dataset"
        )
