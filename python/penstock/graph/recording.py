# SPDX-License-Identifier: Apache-2.0
"""Record the ATen operators behind each call of a captured graph.

The graph is interpreted on fake tensors while a dispatch mode watches: the operators that reach the
dispatcher below autograd are exactly the operators that eager would run, so no decomposition of
ours can change a bit. The result is in single-assignment form: every tensor object has a name, and
an in-place write to a tensor that shares its memory with no other one is recorded as its functional
twin and gives the object a new name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from penstock.compat.operators import (
    OpOverload,
    TorchDispatchMode,
    enable_python_dispatcher,
    schema_of,
    tree_leaves,
    tree_map_only,
)
from penstock.compat.storages import identity
from penstock.graph.operators import (
    COMPOSITE_CALLS,
    functional_twin,
    is_declared,
    operator_name,
    with_numbers,
    written_arguments,
)
from penstock.graph.sizes import expression_of

aten = torch.ops.aten

# Computes no value; the call that it belongs to stays in the trainer.
PINNED = "opaque::pinned"


@dataclass(frozen=True)
class Name:
    """A value of the recording."""

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def bare(self) -> str:
        """Return the text without its "%", as in the native graph."""
        return self.text.removeprefix("%")


@dataclass
class RecordedOp:
    """One operator. Tensor arguments are `Name`s, and symbolic sizes are sympy expressions."""

    target: str
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[Name]
    call_index: int


@dataclass(frozen=True)
class Form:
    """The form of a tensor when it got its name. Sizes may be symbolic."""

    dtype: torch.dtype
    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    storage: int
    device: torch.device
    is_lazy: bool = False  # its memory holds the conjugates or the negatives of its numbers


@dataclass
class Recording:
    """All operators in order, and the facts about their names and storages."""

    ops: list[RecordedOp] = field(default_factory=list)
    literals: dict[Name, torch.Tensor] = field(default_factory=dict)
    superseded: set[Name] = field(default_factory=set)  # names whose object was written to later
    mutated_storages: set[int] = field(default_factory=set)
    forms: dict[Name, Form] = field(default_factory=dict)
    fused_calls: list[tuple[int, int]] = field(default_factory=list)  # calls that stay together
    pins: dict[int, str] = field(default_factory=dict)  # reasons why calls never move

    def pin(self, call_index: int, values: Sequence[Name], reason: str) -> None:
        """Mark a call as one that never moves, for that `reason`, and that needs `values`."""
        self.pins.setdefault(call_index, reason)
        self.ops.append(RecordedOp(PINNED, list(values), {}, [], call_index))


# Queries of sizes and dtypes, which reach the dispatcher if sizes are symbolic, for example; they
# compute no values.
SILENT_OPERATORS = frozenset(
    {
        torch.ops.prim.device.default,
        torch.ops.prim.layout.default,
        aten.size.default,
        aten.sym_size.default,
        aten.sym_size.int,
        aten.stride.default,
        aten.sym_stride.default,
        aten.sym_stride.int,
        aten.sym_numel.default,
        aten.sym_storage_offset.default,
        aten.storage_offset.default,
        aten.is_contiguous.default,
        aten.is_contiguous.memory_format,
        aten.is_non_overlapping_and_dense.default,
        aten.is_strides_like_format.default,
        aten.promote_types.default,
        aten.result_type.Tensor,
        aten.result_type.Scalar,
        aten.result_type.Scalar_Tensor,
        aten.result_type.Scalar_Scalar,
    }
)


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key that is equal for tensors that share memory.

    A tensor whose layout has no storage counts as separate memory.
    """
    if tensor.layout is not torch.strided:
        return id(tensor)
    return identity(tensor.untyped_storage())


class Recorder(TorchDispatchMode):
    """Records operators. Confined to the thread that lowers.

    `begin_call` sets the call to which the next operators belong.
    """

    def __init__(self, shape_env: ShapeEnv | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self._shape_env = shape_env
        # Weak, so that a tensor that cannot be written to any more does not count: factories make
        # two.
        self._names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._objects: dict[int, list[TensorWeakRef]] = {}  # storage -> tensors on it
        self._held: list[Any] = []  # storages, so that their keys stay unique
        self._origin: dict[int, int | None] = {}  # storage -> call that made it; None: input
        self._call_index = -1
        self._paused = False
        self._name_count = 0

    def begin_call(self, call_index: int) -> None:
        self._call_index = call_index

    def name_input(self, tensor: torch.Tensor, name: Name) -> None:
        self._bind(tensor, name)
        self._origin[storage_key(tensor)] = None

    def note_input_memory(self, tensor: torch.Tensor) -> None:
        """Mark this tensor's memory as shared with others, like an input's memory."""
        self._origin[storage_key(tensor)] = None

    def name_of(self, tensor: torch.Tensor) -> Name:
        """Return the name of the tensor's present value."""
        name: Name | None = self._names.get(tensor)
        if name is None:
            # A tensor that the program made from Python numbers.
            name = Name(f"%l{len(self.recording.literals)}")
            self.recording.literals[name] = tensor
            self.name_input(tensor, name)
        return name

    def names_in(self, value: Any) -> Any:
        """Return the same nest with every tensor replaced by its present name."""
        return tree_map_only(torch.Tensor, self.name_of, value)

    def record_composite(self, operator: OpOverload, args: list[Any]) -> Any:
        """Record `operator` as one node, without the operators that it is composed of."""
        encoded = self._encode(args)
        self._paused = True
        try:
            with enable_python_dispatcher():
                out = operator(*args)
        finally:
            self._paused = False
        self._append(operator, encoded, {}, out)
        return out

    def pin_call(self, values: Sequence[Name], reason: str) -> None:
        """Mark the present call as one that never moves, for `reason`, and that needs `values`."""
        self.recording.pin(self._call_index, values, reason)

    def note_reads(self, values: Sequence[Name]) -> None:
        """Record that the present call reads `values`, even if no operator does (`expand_as`)."""
        for value in values:
            op = RecordedOp("size::numel", [value], {}, [self._fresh_name()], self._call_index)
            self.recording.ops.append(op)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._paused or func in SILENT_OPERATORS:
            return func(*args, **kwargs)
        if func is aten.lift_fresh.default:
            name = self.name_of(args[0])
            out = func(*args)
            self._bind(out, name)
            self._origin[storage_key(out)] = None
            return out
        if func is aten.detach.default and not args[0].requires_grad:
            out = func(*args)
            self._bind(out, self.name_of(args[0]))
            return out
        encoded = self._encode(args), self._encode(kwargs)
        written = written_arguments(func, args, kwargs)
        if written:
            twin = self._twin_of(func, args, kwargs, written)
            out = func(*args, **kwargs)
            if twin is not None:
                self._record_twin(twin, *encoded, written[0])
                return out
            self.recording.mutated_storages.update(storage_key(t) for t in written)
        else:
            out = func(*args, **kwargs)
        self._append(func, *encoded, out)
        return out

    def _twin_of(
        self, func: OpOverload, args: Any, kwargs: Any, written: list[torch.Tensor]
    ) -> OpOverload | None:
        """Return the functional operator that may replace a write, or None if there is none."""
        target = written[0]
        key = storage_key(target)
        if len(written) != 1 or not args or target is not args[0] or target.requires_grad:
            return None
        if self._origin.get(key) is None:
            return None  # an input
        if any(other is not target for other in self._living(key)):
            return None  # shares its memory with another tensor
        if any(other is target for other in tree_leaves([args[1:], kwargs])):
            # `y.add_(y, alpha=0.3)`: kernels that read the tensor they write to take other paths
            # through their loops, and round differently.
            return None
        twin = functional_twin(func)
        if twin is None:
            return None
        if twin.is_view_alone:
            return twin.operator  # no data moves, so there is no result that could differ
        result = twin.operator(*args, **kwargs)
        same = (
            isinstance(result, torch.Tensor)
            and result.dtype == target.dtype
            and result.shape == target.shape
            and result.stride() == target.stride()
        )
        return twin.operator if same else None

    def _record_twin(
        self, twin: OpOverload, args: list[Any], kwargs: dict[str, Any], target: torch.Tensor
    ) -> None:
        key = storage_key(target)
        origin = self._origin[key]
        assert origin is not None
        self.recording.superseded.add(self.name_of(target))
        name = self._fresh_name()
        self._rebind(target, name)
        self.recording.ops.append(
            RecordedOp(
                operator_name(with_numbers(twin, args)), args, kwargs, [name], self._call_index
            )
        )
        if origin != self._call_index:
            self.recording.fused_calls.append((origin, self._call_index))

    def _append(self, func: OpOverload, args: list[Any], kwargs: dict[str, Any], out: Any) -> None:
        results = out if len(schema_of(func).returns) > 1 else [out] * len(schema_of(func).returns)
        target = operator_name(with_numbers(func, args))
        if is_declared(func):
            target = f"declared::{target}"
        op = RecordedOp(target, args, kwargs, [], self._call_index)
        self.recording.ops.append(op)
        for result in results:
            name = self._fresh_name()
            op.outputs.append(name)
            if isinstance(result, torch.Tensor):
                self._rebind(result, name)
            elif isinstance(result, (list, tuple)):
                self._append_elements(name, result)

    def _append_elements(self, name: Name, tensors: Sequence[Any]) -> None:
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor):
                element = self._fresh_name()
                get = RecordedOp("list::get", [name, index], {}, [element], self._call_index)
                self.recording.ops.append(get)
                self._rebind(tensor, element)

    def _encode(self, value: Any) -> Any:
        """Return the present arguments: tensors by name, symbolic sizes by expression."""
        if isinstance(value, torch.Tensor):
            return self.name_of(value)
        if isinstance(value, torch.SymInt):
            return expression_of(value, self._shape_env)
        if isinstance(value, (list, tuple)):
            return [self._encode(item) for item in value]
        if isinstance(value, Mapping):
            return {key: self._encode(item) for key, item in value.items()}
        return value

    def _fresh_name(self) -> Name:
        self._name_count += 1
        return Name(f"%v{self._name_count}")

    def _bind(self, tensor: torch.Tensor, name: Name) -> None:
        self._rebind(tensor, name)
        self._origin.setdefault(storage_key(tensor), self._call_index)

    def _rebind(self, tensor: torch.Tensor, name: Name) -> None:
        key = storage_key(tensor)
        is_strided = tensor.layout is torch.strided
        strides = tuple(tensor.stride()) if is_strided else ()
        is_lazy = tensor.is_conj() or tensor.is_neg()
        self.recording.forms[name] = Form(
            tensor.dtype, tuple(tensor.shape), strides, key, tensor.device, is_lazy
        )
        if key not in self._objects:
            self._held.append(tensor.untyped_storage() if is_strided else tensor)
            self._objects[key] = []
        if tensor not in self._names:
            self._objects[key].append(TensorWeakRef(tensor))
        self._names[tensor] = name
        self._origin.setdefault(key, self._call_index)

    def _living(self, key: int) -> list[torch.Tensor]:
        """Return the tensors on a storage that are still alive."""
        living = [(ref, ref()) for ref in self._objects[key]]
        self._objects[key] = [ref for ref, tensor in living if tensor is not None]
        return [tensor for _, tensor in living if tensor is not None]


class CompositeOperators(TorchFunctionMode):
    """Intercepts calls that must be recorded whole, before they are decomposed."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        whole = COMPOSITE_CALLS.get(func)
        described = whole(*args, **kwargs) if whole is not None else None
        if described is None:
            return func(*args, **kwargs)
        return self._recorder.record_composite(*described)
