# SPDX-License-Identifier: Apache-2.0
"""Compare a captured graph with the forward from which it was captured.

A graph repeats a forward as it was at the capture. If the program has changed something since then
that Dynamo does not guard, the graph remains the same. So for some calls (the first, the first of
each epoch, one in `verify_every`, and any call before which a change was detected), Python runs the
forward as it would without penstock, and the graph runs in addition, only for the comparison.

The comparison run has no side effects. It precedes the forward and runs only the graph: no hook, no
`print` and no other line of the program. It works on copies of the tensors that it may write to,
and the generators are restored. A graph with an operator that may have side effects, or that writes
to a parameter, is not compared; this is determined once for each graph, in a separate run, since
some composite operators use other kernels where a dispatch mode watches. A call that Dynamo
captures as several graphs has lines of the program between them, so it has no comparison run; if a
change was detected, it is captured again.

Some kernels add in a different order each time. So a difference counts only if the graph gives the
same bits in a second run, on copies of the same inputs and with the same generator states.

Dynamo assumes that the environment, classes and functions stay as they were when it captured a
graph. A program may replace a method between two epochs, or read a variable that it sets. A check
of all of them (`ProgramState`) takes some microseconds, so each call is preceded by one.
"""

from __future__ import annotations

import os
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.compat.dynamo import patch_modules
from penstock.compat.modules import global_hooks
from penstock.compat.operators import TorchDispatchMode, schema_of, tree_leaves
from penstock.compat.process_group import default_group
from penstock.compat.storages import identity, write_count
from penstock.cut.whole_comparison import copies_of
from penstock.graph.capture import autocast_restored
from penstock.graph.constants import is_same_bits
from penstock.graph.operators import is_declared
from penstock.stream.batch_seeds import AllGeneratorsKept, torch_states
from penstock.tracking.leaves import flatten_batch

# Larger tensors are not copied; a graph that writes to one is not compared.
COPIED_BYTES_MAX = 16 << 20
# Whether the model is in training, and whether gradients are on.
Mode = tuple[bool, bool]
_LIBRARIES = frozenset({"aten", "prims", "prim", "torchvision"})

_MISSING = object()


class HasSideEffects(Exception):
    """Raised if the graph would have effects that cannot be undone."""


class ObservationDone(Exception):
    """Ends a run for the comparison once the graph has run."""


@dataclass
class Observation:
    """A graph's results for one call, and all side effects that the run would have had."""

    results: list[torch.Tensor] = field(default_factory=list)
    given: list[torch.Tensor] = field(default_factory=list)  # inputs
    copies: list[torch.Tensor] = field(default_factory=list)  # in their positions, after the run
    drawn: list[torch.Tensor] = field(default_factory=list)  # states of the generators
    # Write counts of inputs before the forward runs, and of copies before the graph ran.
    versions: list[tuple[int, int]] = field(default_factory=list)
    again: Callable[[], Observation] | None = None  # runs the graph again under the same conditions

    def difference(self, result: Any, had: Iterable[torch.Tensor]) -> str | None:
        """Return the first difference between the graph and the forward, which returned `result`.

        The forward may return a tensor that it `had` before, which no graph does.
        """
        given = {id(tensor) for tensor in (*self.given, *had)}
        for tensor in _tensors_of(result):
            if id(tensor) not in given and not any(_is_same(tensor, one) for one in self.results):
                return "results"
        for tensor, copy, version in zip(self.given, self.copies, self.versions, strict=True):
            if (_writes(tensor), _writes(copy)) == version:
                continue
            # A graph that writes to tensors without copies is not run.
            if tensor is copy or not is_same_bits(tensor, copy):
                return "buffers"
        if not all(map(torch.equal, self.drawn, torch_states())):
            return "random numbers"
        return None

    def is_repeatable(self) -> bool:
        """Return whether the graph gives the same bits when it runs again.

        Kernels that add in any order do not; a difference from the forward is then meaningless.
        """
        assert self.again is not None
        for tensor, copy, (version, _) in zip(self.given, self.copies, self.versions, strict=True):
            if tensor is copy and _writes(tensor) != version:
                return True  # cannot be determined: the graph's input has changed
        try:
            other = self.again()
        except Exception:  # such as too little memory along with the tensors that the forward saved
            return True
        return all(
            _is_same(a, b)
            for a, b in zip(
                (*self.results, *self.copies), (*other.results, *other.copies), strict=True
            )
        )


def observe(
    run: Callable[..., Any], inputs: Sequence[Any], contained: set[tuple[int, ...]]
) -> Observation:
    """Run a graph without side effects. Raises HasSideEffects if that is impossible.

    `contained` belongs to the graph: it has the sets of uncopied inputs for which the graph is
    known to have no side effects.
    """
    spare = _copies(inputs)
    uncopied = tuple(
        place
        for place, (given, copy) in enumerate(zip(inputs, spare, strict=True))
        if given is copy and isinstance(given, torch.Tensor)
    )
    if uncopied not in contained:
        with AllGeneratorsKept(), _SideEffectGuard([inputs[place] for place in uncopied]):
            _observed(run, inputs)
        contained.add(uncopied)
    before = AllGeneratorsKept()
    with before:
        observation = _observed(run, inputs)

    def again() -> Observation:
        with AllGeneratorsKept():
            before.restore()
            return _observed(run, spare)

    observation.again = again
    return observation


def _observed(run: Callable[..., Any], inputs: Sequence[Any]) -> Observation:
    copies = _copies(inputs)
    tensors = [(a, b) for a, b in zip(inputs, copies, strict=True) if isinstance(a, torch.Tensor)]
    versions = [(_writes(given), _writes(copy)) for given, copy in tensors]
    with (
        torch.set_grad_enabled(torch.is_grad_enabled()),
        autocast_restored(),
        # The program's hooks are not called, and no tensors are saved for a backward pass.
        torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing),
    ):
        results = [one for one in tree_leaves(run(*copies)) if isinstance(one, torch.Tensor)]
        drawn = torch_states()
    return Observation(
        # Detached from the graph of the gradients, which is freed.
        [one.detach().requires_grad_(one.requires_grad) for one in results],
        [given for given, _ in tensors],
        [copy for _, copy in tensors],
        drawn,
        versions,
    )


def _nothing(_: Any) -> Any:
    return None


def _copies(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs with copies of the tensors, except parameters and large tensors."""

    def is_copied(tensor: torch.Tensor) -> bool:
        return (
            not isinstance(tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.untyped_storage().nbytes() <= COPIED_BYTES_MAX
        )

    return copies_of(inputs, is_copied)


class _SideEffectGuard(TorchDispatchMode):
    """Rejects operators that may have side effects, and writes to tensors that were not copied."""

    def __init__(self, uncopied: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._uncopied = set(map(_storage_of, uncopied)) - {None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in _LIBRARIES and not is_declared(func):
            raise HasSideEffects(f"{func} may do more than compute")
        schema = schema_of(func)
        if schema.is_mutable:
            values = [*args, *kwargs.values()]
            names = [argument.name for argument in schema.arguments[: len(args)]] + list(kwargs)
            written = {
                argument.name
                for argument in schema.arguments
                if argument.alias_info is not None and argument.alias_info.is_write
            }
            for name, value in zip(names, values, strict=True):
                if name in written and any(
                    _storage_of(one) in self._uncopied
                    for one in tree_leaves(value)
                    if isinstance(one, torch.Tensor)
                ):
                    raise HasSideEffects(f"{func} writes to a tensor that is not copied")
        return func(*args, **kwargs)


def _storage_of(tensor: torch.Tensor) -> int | None:
    return identity(tensor.untyped_storage()) if tensor.layout is torch.strided else None


def _writes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else write_count(tensor)


def _tensors_of(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a forward's result, in containers and objects of any kind.

    Return none if the result contains itself or is half initialised.
    """
    try:
        tensors = flatten_batch(result) or [
            one for one in tree_leaves(result) if isinstance(one, torch.Tensor)
        ]
        return tensors or flatten_batch(getattr(result, "__dict__", None))
    except (AttributeError, RecursionError):
        return []


def _attributes(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the attributes of a module, including the items of its dicts, lists and tuples."""
    for value in vars(module).values():
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout is not b.layout or a.requires_grad != b.requires_grad or a.device != b.device:
        return False
    if a.layout is not torch.strided:
        return a.shape == b.shape  # only the shape is compared
    return is_same_bits(a, b)


class Schedule:
    """Decides which calls of one offloaded model are compared. Confined to the training thread."""

    def __init__(self, modules: Callable[[], Iterable[torch.nn.Module]], verify_every: int) -> None:
        """`modules` returns the model's modules; the model may have been deleted."""
        self._modules = modules
        self._verify_every = verify_every
        # By mode, since the last comparison: programs alternate between training and validation,
        # which have separate graphs.
        self._calls: Counter[Mode] = Counter()
        self._epochs: dict[Mode, int] = {}
        self._moved: dict[Mode, list[str]] = {}
        self._state = ProgramState(self._all_modules())

    def is_due(self, mode: Mode, epoch: int) -> bool:
        """Return whether the next call is to be compared; call exactly once for each."""
        self._calls[mode] += 1
        changes = self._state.changes()
        if changes:
            for names in self._moved.values():
                names += changes
            self._epochs.clear()  # the graphs of all modes are to be compared
        return epoch != self._epochs.get(mode) or self._calls[mode] >= self._verify_every

    def has_moved(self, mode: Mode) -> bool:
        """Return whether a change was detected since the last comparison."""
        return bool(self._moved.get(mode))

    def has_other_code(self, mode: Mode) -> bool:
        """Return whether functions were replaced, rather than only the environment changed."""
        return any(not name.startswith("os.environ") for name in self._moved.get(mode, ()))

    def tensors_before(self, arguments: Any) -> list[torch.Tensor]:
        """Return the tensors that exist before a call: its arguments, and the model's tensors."""
        attributes = (one for module in self._all_modules() for one in _attributes(module))
        values = (*tree_leaves(arguments), *attributes)
        return [
            *_tensors_of(arguments),
            *(value for value in values if isinstance(value, torch.Tensor)),
        ]

    def done(self, mode: Mode, epoch: int) -> None:
        """Note a comparison; also call this if none is possible."""
        if epoch != self._epochs.get(mode):
            self._state.watch(self._all_modules())  # the model may have other parts by now
        self._calls[mode], self._epochs[mode], self._moved[mode] = 0, epoch, []

    def format_reason(self, mode: Mode, difference: str) -> str:
        """Return the differences and the detected changes as text for users."""
        changed = [*dict.fromkeys(self._moved.get(mode, ())), *shadowed_parts(self._all_modules())]
        if changed:
            because = f"{', '.join(changed)} changed"
        else:
            because = "something changed that Dynamo does not guard or captured incorrectly"
        return f"its captured graph gives different {difference} than its forward ({because})"

    def _all_modules(self) -> list[torch.nn.Module]:
        return [part for module in self._modules() for part in module.modules()]


class ProgramState:
    """The parts of a program that a captured graph depends on and Dynamo does not guard.

    Confined to one thread.
    """

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        """`modules` are the model's modules, including all nested ones."""
        patch_modules()  # otherwise the first capture would count as a change of the program
        # Live mappings, their names for users, and copies.
        self._watched: list[tuple[Mapping[Any, Any], str, dict[Any, Any]]] = []
        self._kinds: set[type] = set()
        functional = vars(torch.nn.functional)
        self._watched.append((functional, "torch.nn.functional.", dict(functional)))
        self.watch(modules)
        self._variables = _variables()
        self._variables_then = dict(self._variables)
        self._hooks_then = [dict(hooks) for hooks in global_hooks()]
        self._group_then = default_group()

    def watch(self, modules: list[torch.nn.Module]) -> None:
        """Watch the classes of these modules, too."""
        kinds = _classes_of(modules)
        for kind in kinds - self._kinds:
            self._watched.append((vars(kind), f"{kind.__qualname__}.", dict(vars(kind))))
        self._kinds |= kinds

    def changes(self) -> list[str]:
        """Return names of the changes since the last call."""
        changed: list[str] = []
        if self._variables != self._variables_then:
            now, then = self._variables, self._variables_then
            names = sorted(
                os.fsdecode(name)
                for name in now.keys() | then.keys()
                if now.get(name) != then.get(name)
            )
            changed += [f"os.environ[{name!r}]" for name in names]
            self._variables_then = dict(now)
        for place, (living, name, copy) in enumerate(self._watched):
            if not _is_unchanged(living, copy):
                self._watched[place] = (living, name, dict(living))
                changed += [name + one for one in _replaced(copy, living)]
        hooks = global_hooks()
        if any(map(_differ, hooks, self._hooks_then)):
            self._hooks_then = [dict(one) for one in hooks]
            changed.append("a hook for all modules")
        if default_group() is not self._group_then:
            self._group_then = default_group()
            changed.append("the process group")
        return changed


class ProgramStamp:
    """The state of a program, for holders that must keep none of it alive.

    Functions are held weakly.
    """

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        patch_modules()
        self._kinds = [weakref.ref(kind) for kind in _classes_of(modules)]
        self._then = self._now()

    def is_current(self) -> bool:
        """Return whether the state is unchanged since this stamp was made."""
        return self._then == self._now()

    def _now(self) -> tuple[Any, ...]:
        kinds = [kind() for kind in self._kinds]
        places = [vars(torch.nn.functional), *(vars(kind) for kind in kinds if kind is not None)]
        return (
            len(places),
            dict(_variables()),
            [{name: _weakly(one) for name, one in place.items()} for place in places],
            [list(hooks) for hooks in global_hooks()],  # hook ids, which are unique
            id(default_group()),
        )


def _classes_of(modules: list[torch.nn.Module]) -> set[type]:
    return {kind for module in modules for kind in type(module).__mro__ if kind is not object}


def _variables() -> Mapping[Any, Any]:
    """Return the environment, without decoding each variable."""
    variables: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
    return variables


def _weakly(value: Any) -> Any:
    """Return a value that identifies a function or a property and keeps neither alive.

    Dynamo guards plain values.
    """
    if isinstance(value, property):
        return [_weakly(one) for one in (value.fget, value.fset, value.fdel)]
    value = getattr(value, "__func__", value)  # the function of a static method or a class method
    return weakref.ref(value) if isinstance(value, types.FunctionType) else None


def _differ(living: Mapping[Any, Any], copy: Mapping[Any, Any]) -> bool:
    return bool(living or copy) and not _is_unchanged(living, copy)


def _is_unchanged(living: Mapping[Any, Any], copy: Mapping[Any, Any]) -> bool:
    try:
        return bool(living == copy)
    except Exception:  # values that cannot be compared with former ones, such as arrays
        return False


def _replaced(then: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[str]:
    """Return the replaced functions, methods and properties; Dynamo guards plain values."""
    names = [
        str(name)
        for name in now.keys() | then.keys()
        if now.get(name, _MISSING) is not then.get(name, _MISSING)
        and any(
            callable(value) or hasattr(type(value), "__get__")
            for value in (now.get(name), then.get(name))
        )
    ]
    return sorted(names)


def shadowed_parts(modules: list[torch.nn.Module]) -> list[str]:
    """Return the submodules, parameters and buffers that an attribute of the same name hides."""
    return [
        f"{type(module).__name__}.{name}"
        for module in modules
        for parts in (module._modules, module._parameters, module._buffers)
        for name in parts
        if name in vars(module)
    ]
