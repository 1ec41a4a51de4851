# SPDX-License-Identifier: Apache-2.0
"""Decide which operators on a batch may be deferred, and how their results depend on it.

A deferred result has an expression, like the result of a captured graph. The same operators on the
same leaves of another batch have the same expression, as an object, since it is the key by which
plans are found.
"""

from __future__ import annotations

import operator
import traceback
import weakref
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.compat.devices import is_capturing, with_index
from penstock.compat.modules import graph_module
from penstock.compat.operators import returns_views
from penstock.compat.storages import write_count
from penstock.graph.capture import GraphInput
from penstock.graph.constants import is_same_bits
from penstock.graph.expression import Expression
from penstock.tracking.batch_origin import BatchHandle, Provenance, ProvenanceTable
from penstock.tracking.lazy_tensor import LazyTensor
from penstock.tracking.lazy_value import LazyValue, compute_waiting, replaying, values_of
from penstock.tracking.leaves import Form, call_of, flatten_call, replace_leaves
from penstock.tracking.placed_tensors import converted_copy, converts_alike

# Limit of recipes that are kept.
RECIPES_MAX = 512
# The largest tensor of the program, such as a mean, that a deferred operator may read.
CONSTANT_BYTES_MAX = 4096
CONSTANTS_MAX = 64
VALUES_MAX = 256  # values on the host that are watched for repetition
# A result that is still referenced is computed this many batches after its own batch, so that it
# does not keep the batch's memory alive.
BATCHES_WAITED_MAX = 2
# Copies ahead that the program has not taken are kept for this many batches.
BATCHES_PLACED_MAX = 64
# One batch in this many is lazy for models of which no calls move.
SAMPLED_EVERY = 16
_OTHER_TAGS = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
# Operators that may be deferred in addition to views and elementwise ones. None of them fails
# because of its input values, so errors are raised where the program calls them.
_WHOLE = frozenset(
    """_adaptive_avg_pool2d _adaptive_avg_pool3d _fft_c2c _fft_c2r _fft_r2c _log_softmax _softmax
    _to_copy addmm amax amin aminmax any all argmax argmin avg_pool2d avg_pool3d baddbmm bmm cat
    clone constant_pad_nd convolution cumprod cumsum flip linalg_vector_norm logcumsumexp logsumexp
    max_pool2d_with_indices mean mm mv norm pixel_shuffle pixel_unshuffle pow prod
    reflection_pad1d reflection_pad2d reflection_pad3d repeat replication_pad1d replication_pad2d
    replication_pad3d roll stack std sum tril triu upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d var where""".split()
)
# Operators that fail for integers with a zero divisor.
_DIVISIONS = frozenset({"div", "floor_divide", "fmod", "remainder"})
_FORM_OF_COPY = frozenset({"device", "dtype", "memory_format", "non_blocking"})
_SCALARS = (int, str, torch.dtype, torch.layout, torch.memory_format, type(None))
# Limit of calls in one expression. If a program does more to a batch, the rest is computed
# immediately.
CALLS_MAX = 64
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


@dataclass
class _Constant:
    """A small tensor of the program, which may write to it: expressions read a copy."""

    first_batch: weakref.ref[BatchHandle]
    copy: torch.Tensor | None = None
    mark: tuple[int, int] = (0, 0)  # its address and write count at the last comparison
    has_changed: bool = False


class Deferral:
    """The deferred results of one loader. Confined to the training thread."""

    def __init__(self, provenance: ProvenanceTable) -> None:
        self.provenance = provenance  # the facts about the loader's tensors
        self._recipes: dict[Any, Recipe | None] = {}
        self._constants: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._values: dict[Any, _Constant] = {}  # of the host, by their values
        self._copies: list[torch.Tensor] = []  # of constants, which recipes identify by their ids
        self._recent: deque[weakref.ref[BatchHandle]] = deque()
        self._delivered: deque[weakref.ref[BatchHandle]] = deque()
        # Offloaded models, by their numbers: models that want each batch lazy, and models that want
        # one in `SAMPLED_EVERY`.
        self.wanted_by: set[int] = set()
        self.sampled_by: set[int] = set()
        self._sampled_batches = 0  # since the last lazy one

    def forget_user(self, user: int) -> None:
        """Note that an offloaded model no longer has any use for lazy tensors."""
        self.wanted_by.discard(user)
        self.sampled_by.discard(user)

    def follow(
        self, handle: BatchHandle, leaves: Sequence[torch.Tensor], only: Set[int] | None = None
    ) -> dict[int, LazyTensor]:
        """Return lazy tensors for the leaves of a delivered batch, by the id of the leaf.

        With `only`, return them for the leaves at these places.
        """
        self._recent.append(weakref.ref(handle))
        while len(self._recent) > BATCHES_WAITED_MAX:
            old = self._recent.popleft()()
            if old is not None:
                compute_waiting(old)
        return {
            id(leaf): LazyTensor.of(
                LazyValue(
                    self,
                    handle,
                    torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta"),
                    index,
                    device=leaf.device,
                    tensor=leaf,
                )
            )
            for index, leaf in enumerate(leaves)
            if type(leaf) is torch.Tensor
            and (only is None or index in only)
            and self.provenance.lookup(leaf) is not None
        }

    def delivered(self, batch: Any, handle: BatchHandle, leaves: Sequence[torch.Tensor]) -> Any:
        """Return the batch for the program; `leaves` are the tensors in it.

        It has lazy tensors if an offloaded model has a use for them, or to detect which tensors the
        program copies.
        """
        self._drop_unused_copies(handle)
        if torch.is_inference_mode_enabled():
            return batch
        withholding = self.provenance.withholding
        if self.wanted_by or self._is_sample():
            handle.is_watched = True
            return replace_leaves(batch, self.follow(handle, leaves))
        placements = self.provenance.placements
        followed = placements.followed(len(leaves), is_offloaded=bool(self.sampled_by))
        if withholding is not None and withholding.lazy_leaves:
            handle.is_watched = True
            followed = followed | withholding.lazy_leaves
        if not followed:
            return batch
        handle.may_wait = False
        return replace_leaves(batch, self.follow(handle, leaves, followed))

    def _is_sample(self) -> bool:
        if not self.sampled_by:
            return False
        self._sampled_batches = (self._sampled_batches + 1) % SAMPLED_EVERY
        return self._sampled_batches == 0

    def _drop_unused_copies(self, newest: BatchHandle) -> None:
        """Drop old copies: a program that keeps its batches does not keep their copies as well."""
        self._delivered.append(weakref.ref(newest))
        while len(self._delivered) > BATCHES_PLACED_MAX:
            old = self._delivered.popleft()()
            if old is not None:
                old.ahead = None

    def withheld(self, handle: BatchHandle, place: int, leaf: LazyTensor) -> None:
        """Make `leaf` represent the leaf at this place, which stayed with its worker."""
        handle.may_wait = bool(self.wanted_by)
        leaf.settle(LazyValue(self, handle, leaf._meta, place, device=leaf.device))

    def stand_in(self, leaf: LazyValue) -> torch.Tensor:
        return LazyTensor.of(leaf)

    def knows(self, leaf: torch.Tensor) -> bool:
        return self.provenance.lookup(leaf) is not None

    def record_result(self, result: torch.Tensor, provenance: Provenance) -> None:
        self.provenance.record_result(result, provenance)

    def forget(self, tensor: torch.Tensor) -> None:
        self.provenance.forget(tensor)

    def note_read(self, leaf: int) -> None:
        self.provenance.placements.note_read(leaf)

    def placed(self, leaf: LazyValue, options: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the result of `_to_copy` with these options from the copy that was made ahead.

        It is the copy on a device of an unchanged leaf. Return None if the operator has to run.
        """
        handle, tensor = leaf.batch, leaf.tensor
        named = options.get("device")
        if handle is None or tensor is None or named is None or not isinstance(leaf.source, int):
            return None
        device = with_index(named)
        others = options.keys() - _FORM_OF_COPY
        dtype = options.get("dtype")
        if (
            device.type in ("cpu", "meta")
            or tensor.device.type != "cpu"
            or any(options[name] not in (None, False, torch.strided) for name in others)
            # With `non_blocking`, torch itself converts on the device.
            or not (options.get("non_blocking") or converts_alike(tensor.dtype, dtype))
            or not self.knows(tensor)
            or is_capturing(device)
        ):
            return None
        handle.read_leaves.add(leaf.source)
        placements, memory_format = self.provenance.placements, options.get("memory_format")
        return converted_copy(
            tensor,
            device,
            handle,
            placements,
            leaf.source,
            dtype=dtype,
            memory_format=memory_format,
        )

    def note_write(self, value: LazyValue) -> None:
        """Prepare for a write to `value`; call before it.

        Compute the deferred values of its batch, and forget the expressions of all tensors that
        share its memory.
        """
        handle = value.batch
        if handle is None:
            return
        compute_waiting(handle)
        memory = value.materialise().untyped_storage().data_ptr()
        for other in values_of(handle):
            if other.is_withheld:
                continue  # it shares memory with no other
            tensor = other.materialise()
            if tensor.untyped_storage().data_ptr() == memory:
                self.provenance.forget(tensor)

    def end_waiting(self, value: LazyValue) -> None:
        """Stop deferring for the batch of `value`.

        Call before its memory is passed to code that may write to it undetected.
        """
        self.note_write(value)
        if value.batch is not None:
            value.batch.may_wait = False

    def defer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a lazy tensor for a pure operator's result; None if it has to run immediately."""
        if torch.is_inference_mode_enabled() or func.namespace != "aten":
            return None
        leaves, form = flatten_call(args, kwargs)
        handle: BatchHandle | None = None
        key: list[Any] = [func, form]
        values: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, LazyTensor):
                assert leaf._value is not None
                present = leaf._value.handle
                if present is None or not present.may_wait or present is not (handle or present):
                    return None
                handle = present
                values.append(leaf._value)
                key.append(_key_of_value(leaf._value))
            else:
                values.append(with_index(leaf) if isinstance(leaf, torch.device) else leaf)
                key.append(None)
        if handle is None:
            return None
        for place, leaf in enumerate(values):
            if key[place + 2] is None:
                kept = self._constant(leaf, handle) if isinstance(leaf, torch.Tensor) else leaf
                if kept is None and leaf is not None:
                    return None
                values[place] = kept
                scalar = ("constant", id(kept)) if isinstance(kept, torch.Tensor) else _key(kept)
                if scalar is None:
                    return None
                key[place + 2] = scalar
        return self._waiting(tuple(key), func, values, form, handle)

    def _waiting(
        self, key: Any, func: Any, values: list[Any], form: Form, handle: BatchHandle
    ) -> Any:
        if key not in self._recipes:
            if len(self._recipes) >= RECIPES_MAX:
                return None
            self._recipes[key] = self._recipe(func, values, form)
        recipe = self._recipes[key]
        if recipe is None:
            return None
        inputs = [_input_of(values[argument], place) for argument, place in recipe.taken]
        args, kwargs = call_of(values, form)
        is_view = returns_views(func)
        if is_view:
            for value in values:
                if isinstance(value, LazyValue):
                    value.is_shared = True
        results = [
            LazyTensor.of(
                LazyValue(
                    self,
                    handle,
                    meta,
                    expression,
                    inputs,
                    device=recipe.device,
                    call=(func, args, kwargs, place if recipe.is_list else None),
                    is_shared=is_view,
                )
            )
            for place, (meta, expression) in enumerate(
                zip(recipe.metas, recipe.expressions, strict=True)
            )
        ]
        return results if recipe.is_list else results[0]

    def _constant(self, tensor: torch.Tensor, handle: BatchHandle) -> torch.Tensor | None:
        """Return a copy of a tensor that had the same values when used with an earlier batch."""
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Buffer)
            or tensor.requires_grad
            or tensor.device.type == "meta"
            or tensor.layout is not torch.strided
            or tensor.nbytes > CONSTANT_BYTES_MAX
        ):
            return None
        if tensor.device.type == "cpu":
            return self._constant_of_host(tensor, handle)
        known: _Constant | None = self._constants.get(tensor)
        if known is None:
            self._constants[tensor] = _Constant(weakref.ref(handle))
            return None
        if known.has_changed or known.first_batch() is handle:
            return None
        # Reading its values would make the host wait for the device.
        mark = (tensor.data_ptr(), write_count(tensor))
        if known.copy is None:
            known.copy, known.mark = self._copied(tensor), mark
        elif known.mark != mark:
            if is_same_bits(tensor, known.copy):
                known.mark = mark
            else:
                known.has_changed = True
        return None if known.has_changed else known.copy

    def _constant_of_host(self, tensor: torch.Tensor, handle: BatchHandle) -> torch.Tensor | None:
        """Return the copy by value: programs create windows and means again for each batch."""
        values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        key = (values, tensor.dtype, tensor.shape, tensor.stride())
        known = self._values.get(key)
        if known is None:
            if len(self._values) >= VALUES_MAX:
                unused = (old for old, value in self._values.items() if value.copy is None)
                self._values.pop(next(unused, None), None)
            self._values[key] = _Constant(weakref.ref(handle))
            return None
        if known.first_batch() is handle:
            return None
        if known.copy is None:
            known.copy = self._copied(tensor)
        return known.copy

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if len(self._copies) >= CONSTANTS_MAX:
            return None
        copy = tensor.detach().clone()
        self._copies.append(copy)
        return copy

    def _recipe(self, func: Any, values: list[Any], form: Form) -> Recipe | None:
        name = func.__name__.split(".")[0]
        is_view = returns_views(func)
        if not (is_view or torch.Tag.pointwise in func.tags or name in _WHOLE):
            return None
        if any(tag in func.tags for tag in _OTHER_TAGS):
            return None
        tensor_count = sum(isinstance(v, (LazyValue, torch.Tensor)) for v in values)
        device = _device_of_result(values)
        if device is None:
            return None
        args, kwargs = call_of([_meta_of(value) for value in values], form)
        try:
            with torch.no_grad():
                made = func(*args, **kwargs)
        except Exception:
            return None  # the operator itself will raise it, if it is an error
        is_list = isinstance(made, (list, tuple))
        metas = list(made) if is_list else [made]
        if not metas or not all(
            isinstance(meta, torch.Tensor) and meta.device.type == "meta" for meta in metas
        ):
            return None
        if is_list and not isinstance(made, list):
            return None  # several results of different meaning, such as of max
        if name in _DIVISIONS and tensor_count > 1 and not metas[0].is_floating_point():
            return None
        recipe = make_recipe(func, values, form, metas, device, is_list=is_list)
        return recipe if recipe is not None and _is_computable(recipe, values) else None


def _key_of_value(value: LazyValue) -> Any:
    """Return a key that identifies a lazy argument independently of its batch."""
    meta = value.meta
    source = value.source if isinstance(value.source, int) else id(value.source)
    return (type(value.source), source, meta.dtype, meta.shape, meta.stride(), value.device)


def _key(value: Any) -> Any:
    """Return a key for a value; None for an object whose value cannot be compared."""
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))  # here, minus zero differs from zero
    if isinstance(value, torch.device):
        return (torch.device, str(value))
    return (type(value), value) if isinstance(value, _SCALARS) else None


def _device_of_result(values: Sequence[Any]) -> torch.device | None:
    """Return the device of an operator's result.

    Return None for tensors of several devices: this is an error or follows a special rule of the
    operator.
    """
    named = {value for value in values if isinstance(value, torch.device)}
    devices = named or {v.device for v in values if isinstance(v, (LazyValue, torch.Tensor))}
    return devices.pop() if len(devices) == 1 else None


def _meta_of(value: Any) -> Any:
    if isinstance(value, LazyValue):
        return value.meta
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _is_computable(recipe: Recipe, values: Sequence[Any]) -> bool:
    """Return whether the values can be computed and have the form of the meta tensors.

    Some dtypes have no kernel, and some kernels use other strides.
    """
    inputs = [_input_of(values[argument], place) for argument, place in recipe.taken]
    tensors = [v.materialise() if isinstance(v, LazyValue) else v for v in inputs]
    try:
        with replaying():
            made = [expression.graph_module(*tensors) for expression in recipe.expressions]
    except Exception:
        return False
    return all(
        _form(a) == _form(b) and a.device == recipe.device
        for a, b in zip(made, recipe.metas, strict=True)
    )


def _form(tensor: torch.Tensor) -> Any:
    return (tensor.dtype, tensor.shape, tensor.stride())


def _input_of(value: Any, place: int) -> Any:
    return value if place < 0 else value.inputs[place]


@dataclass(frozen=True)
class Recipe:
    """The results of an operator on lazy arguments."""

    metas: list[torch.Tensor]
    expressions: list[Expression]
    taken: list[tuple[int, int]]  # by input: index of an argument, and of its input
    is_list: bool
    device: torch.device  # device of the results


def make_recipe(
    func: Any,
    values: Sequence[Any],
    form: Form,
    metas: list[torch.Tensor],
    device: torch.device,
    *,
    is_list: bool,
) -> Recipe | None:
    """Return the recipe of `func`, called with `values` in this form.

    Its results look like `metas` and are on `device`. Return None for an expression that has become
    too long.
    """
    return _Assembly(func, values, form).recipe(metas, device, is_list)


class _Assembly:
    """Combines the expressions of an operator's arguments with the operator itself."""

    def __init__(self, func: Any, values: Sequence[Any], form: Form) -> None:
        self._func = func
        self._values = values
        self._form = form
        self._graph = fx.Graph()
        self._taken: list[tuple[int, int]] = []
        self._inputs: list[GraphInput] = []
        self._places: dict[int, fx.Node] = {}  # by the object that is the input
        self._copies: dict[Any, fx.Node] = {}  # by expression

    def recipe(
        self, metas: list[torch.Tensor], device: torch.device, is_list: bool
    ) -> Recipe | None:
        for argument, value in enumerate(self._values):
            if isinstance(value, LazyValue) and not isinstance(value.source, int):
                for place, item in enumerate(value.source.inputs):
                    self._add(argument, place, value.inputs[place], item)
            elif isinstance(value, (LazyValue, torch.Tensor)):
                self._add(argument, -1, value, None)
        arguments = [self._read(value) for value in self._values]
        args, kwargs = call_of(arguments, self._form)
        call = self._graph.call_function(self._func, args, kwargs)
        call.meta["stack_trace"] = _users_line()
        if len(self._graph.nodes) - len(self._inputs) > CALLS_MAX:
            return None
        expressions: list[Expression] = []
        for place in range(len(metas)):
            graph = fx.Graph()
            copies: dict[fx.Node, fx.Node] = {}
            result = graph.graph_copy(self._graph, copies)
            assert result is None
            node = copies[call]
            if is_list:
                node = graph.call_function(operator.getitem, (node, place))
            graph.output(node)
            module = graph_module(torch.nn.Module(), graph)
            expressions.append(Expression(module, tuple(self._inputs), None))
        return Recipe(metas, expressions, self._taken, is_list, device)

    def _add(self, argument: int, place: int, value: Any, item: GraphInput | None) -> None:
        """Note one input, once."""
        if id(value) in self._places:
            return
        index = len(self._inputs)
        if item is None:
            if isinstance(value, LazyValue):
                dims = tuple(range(value.meta.dim()))
                assert isinstance(value.source, int)
                item = GraphInput("leaf", f"batch tensor {value.source}", value.source, dims)
            else:
                item = GraphInput("const", f"a constant of the program ({id(value)})")
        self._places[id(value)] = self._graph.placeholder(f"input_{index}")
        self._inputs.append(item)
        self._taken.append((argument, place))

    def _read(self, value: Any) -> Any:
        if isinstance(value, LazyValue) and not isinstance(value.source, int):
            return self._inline(value.source, value.inputs)
        if isinstance(value, (LazyValue, torch.Tensor)):
            return self._places[id(value)]
        return value

    def _inline(self, expression: Expression, inputs: Sequence[Any]) -> fx.Node:
        if expression in self._copies:
            return self._copies[expression]
        copies: dict[fx.Node, fx.Node] = {}
        remaining = iter(inputs)
        for node in expression.graph_module.graph.nodes:
            if node.op == "placeholder":
                copies[node] = self._places[id(next(remaining))]
            elif node.op == "output":
                self._copies[expression] = copies[node.args[0]]
            else:
                copies[node] = self._graph.node_copy(node, lambda argument: copies[argument])
        return self._copies[expression]


def _users_line() -> str | None:
    """Return the program line that called the operator, in Dynamo's format."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_LIBRARIES):
            return f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n'
    return None
