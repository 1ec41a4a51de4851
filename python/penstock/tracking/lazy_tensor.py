# SPDX-License-Identifier: Apache-2.0
"""A tensor of a batch, or one that depends on it and is computed when its values are read.

The transforms that a program applies to a batch before it calls its model (`images.float() / 255`)
could run in a worker like the model's first operators, if they had not already run by the time the
model is called. So while a program has such transforms, the loader returns tensors of this class.
The batch's tensors have their memory, and every reader of memory finds it there. Results of pure
operators on them are recorded instead of computed; their values are computed as soon as they are
read, and never if they are not.

Dynamo sees a wrapper around a meta tensor, which has no values that it could read by mistake.
Operators that `penstock.tracking.deferral` allows to be deferred are; all others run immediately,
on the values.

While an offloaded model runs or is captured (:func:`is_model_running`), a lazy tensor shows no
values. A program that offloads a model has not asked for a compiler: Dynamo's advice on how to be
captured in fewer graphs is useless to it then, since `loader.plan` has the result of the capture
(:func:`hide_dynamo_advice`).
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.dlpack import from_dlpack

from penstock.compat.dynamo import ADVICE, untraced
from penstock.compat.fake_tensors import FakeTensor, TracingContext, unset_fake_temporarily
from penstock.compat.operators import (
    COPY,
    COPY_INTO,
    TORCH_FUNCTION_OFF,
    DisableTorchDispatch,
    returns_views,
    same_memory_as,
    schema_of,
    tree_leaves,
    tree_map,
    without_memory,
    writes,
)
from penstock.compat.storages import write_count
from penstock.graph.operators import functional_twin
from penstock.tracking.lazy_value import CPU, LazyValue
from penstock.tracking.leaves import flatten_call

_RECORD_STREAM = torch.ops.aten.record_stream.default
_SAME_TENSOR = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class LazyTensor(torch.Tensor):
    """A lazy tensor, as described in the module's docstring.

    `isinstance(x, torch.Tensor)` holds; `type(x) is torch.Tensor` does not.
    """

    _value: LazyValue | None  # None while Dynamo traces
    _meta: torch.Tensor
    _stand_in: torch.Tensor | None  # for the values, during tracing

    is_lazy = True
    __torch_function__ = TORCH_FUNCTION_OFF

    @staticmethod
    def of(value: LazyValue) -> LazyTensor:
        """Return another tensor with that value."""
        if isinstance(value.source, int) and not value.is_withheld:
            # It has its own memory and shares the version counter, so writes are detected.
            assert value.tensor is not None
            tensor: LazyTensor = same_memory_as(value.tensor, LazyTensor)
        else:
            tensor = _wrapper(value.meta, value.device)
        # Runs for each leaf of each batch, so it avoids three calls of `__setattr__` below.
        vars(tensor).update(_value=value, _meta=value.meta, _stand_in=None)
        return tensor

    @classmethod
    def withheld(cls, meta: torch.Tensor, device: torch.device = CPU) -> LazyTensor:
        """Return a tensor for a leaf that stayed with its worker and is to arrive on `device`.

        `settle` sets the leaf.
        """
        tensor = _wrapper(meta, device)
        tensor._value, tensor._meta, tensor._stand_in = None, meta, None
        return tensor

    def settle(self, value: LazyValue) -> None:
        self._value = value

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        """Implement torch's protocol for wrappers.

        Compilers of other code than the offloaded model receive the values.
        """
        if self._value is None:
            is_meta = self._stand_in is not self._meta
        else:
            is_meta = is_model_running()
        return ["_meta" if is_meta else "_materialised"], self.device

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], device: torch.device, size: Any, stride: Any
    ) -> LazyTensor:
        (kind, meta), *_ = inner.items()
        tensor = _wrapper(meta, device, size, stride)
        tensor._value, tensor._meta = None, meta
        tensor._stand_in = None if kind == "_meta" else meta
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    @property
    def _materialised(self) -> torch.Tensor:
        """Return the values, for another compiler than penstock's, whose code may write to them."""
        with unset_fake_temporarily():
            values = self._escaped()
            if self._value is None or not isinstance(self._value.source, int):
                return values
            # The same memory with another storage: fake tensors identify storages by identity, and
            # reject one that is around a wrapper and inside of it.
            seen: torch.Tensor = from_dlpack(values)
            return seen

    # Functions that read values without the dispatcher. Dynamo must not trace into any of them.

    @untraced
    def numpy(self, *, force: bool = False) -> Any:
        return self._escaped().numpy(force=force)

    @untraced
    def tolist(self) -> Any:
        return plain(self).tolist()

    @untraced
    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._escaped().__array__(*args, **kwargs)

    @untraced
    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._escaped().__dlpack__(**kwargs)

    @untraced
    def data_ptr(self) -> int:
        return self._escaped().data_ptr()

    @untraced
    def as_subclass(self, cls: Any) -> Any:
        return self._escaped().as_subclass(cls)

    @untraced
    def untyped_storage(self) -> torch.UntypedStorage:
        if self._value is None or is_model_running() or TracingContext.try_get() is not None:
            return super().untyped_storage()
        return self._escaped().untyped_storage()

    @untraced
    def pin_memory(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return pinned values; withheld leaves arrive in pinned memory if the loader pins."""
        if self._value is None or self._value.is_withheld or self.device != CPU:
            return self
        if self.requires_grad or is_written(self):
            pinned: torch.Tensor = plain(self).pin_memory(*args, **kwargs)
            return pinned
        return LazyTensor.of(self._value.pinned(*args, **kwargs))

    @untraced
    def share_memory_(self) -> LazyTensor:
        self._escaped().share_memory_()
        return self

    @untraced
    def is_shared(self) -> bool:
        return bool(plain(self).is_shared())

    @untraced
    def apply_(self, function: Callable[..., Any]) -> LazyTensor:
        self._escaped().apply_(function)
        return self

    @untraced
    def map_(self, other: torch.Tensor, function: Callable[..., Any]) -> LazyTensor:
        self._escaped().map_(_values_of(other), function)
        return self

    @untraced
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data" and getattr(self, "_value", None) is not None:
            assert self._value is not None
            self._value = self._value.replaced(_values_of(value).detach())
        super().__setattr__(name, value)

    @untraced
    def __format__(self, specification: str) -> str:
        return format(plain(self), specification)

    @untraced
    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(plain(self))

    @untraced
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor: copies are not lazy."""
        return plain(self).__reduce_ex__(protocol)

    @untraced
    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = copy.deepcopy(plain(self), memo)
        return copied

    def _escaped(self) -> torch.Tensor:
        """Return the values for code that may write to them undetected, and stop deferring."""
        if self._value is not None:
            self._value.table.end_waiting(self._value)
        return plain(self)


def plain(tensor: LazyTensor) -> torch.Tensor:
    """Return an ordinary tensor with the values of `tensor`, in its memory if it has any."""
    if tensor._value is not None:
        return tensor._value.read()
    if tensor._stand_in is None:
        meta = tensor._meta
        if not isinstance(meta, FakeTensor):
            raise RuntimeError(
                "penstock: a tensor of a batch was decomposed for a compiler and rebuilt without "
                "its values; call penstock.detach(model) and report this"
            )
        with meta.fake_mode:
            tensor._stand_in = torch.empty_strided(
                meta.shape, meta.stride(), dtype=meta.dtype, device=tensor.device
            )
    return tensor._stand_in


def exclude_reads(tensor: LazyTensor) -> None:
    """Exclude reads of leaves of its batch that stayed with a worker from the program's reads."""
    handle = None if tensor._value is None else tensor._value.batch
    if handle is not None and handle.withheld is not None:
        handle.withheld.counts_reads = False


def values_of_lazy(tensor: LazyTensor) -> torch.Tensor:
    """Return an ordinary tensor like `plain`, for a call of the model that penstock runs in Python.

    This does not count as a read by the program. Deferred values are computed before, since the
    model may write to its inputs.
    """
    if tensor._value is None or tensor.requires_grad:
        return tensor
    tensor._value.table.end_waiting(tensor._value)
    return tensor._value.materialise()


class _Values(torch.autograd.Function):
    """Returns a lazy tensor's values, with gradients that propagate to the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: LazyTensor) -> torch.Tensor:
        return plain(tensor).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def memory_in(arguments: Any) -> Any:
    """Return a call's arguments for code that reads memory, such as a compiler's code.

    They have an ordinary tensor for each lazy one. This does not count as a read by the program.
    """
    return tree_map(_memory_of, arguments)


def _memory_of(argument: Any) -> Any:
    if type(argument) is not LazyTensor or argument._value is None:
        return argument
    if argument.requires_grad:
        return _Values.apply(argument)
    return values_of_lazy(argument)


def values_in(arguments: Any) -> Any:
    """Return the arguments of a call with an ordinary tensor for each lazy one."""
    return tree_map(_values_of, arguments)


def has_lazy_in(arguments: Any) -> bool:
    """Return whether a lazy tensor is among the arguments of a call."""
    return any(type(item) is LazyTensor for item in tree_leaves(arguments))


def is_written(tensor: LazyTensor) -> bool:
    """Return whether `tensor` was written to, so that its expression is no longer valid."""
    return tensor._value is not None and write_count(tensor) != tensor._value.first_version


def _wrapper(
    meta: torch.Tensor, device: torch.device, size: Any = None, stride: Any = None
) -> LazyTensor:
    tensor: LazyTensor = without_memory(LazyTensor, meta, device, size, stride)
    return tensor


def _values_of(argument: Any) -> Any:
    return plain(argument) if isinstance(argument, LazyTensor) else argument


@untraced
def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    if func is COPY and not _may_wait(args[0]):
        return _copied(args[0], kwargs)
    lazies = [item for item in flatten_call(args, kwargs)[0] if isinstance(item, LazyTensor)]
    values = [item._value for item in lazies if item._value is not None]
    if func is _RECORD_STREAM:
        return _record_stream(*args)
    if func is COPY_INTO and len(values) == len(lazies) and not isinstance(args[0], LazyTensor):
        return _copy_into(*args, **kwargs)
    if writes(func):
        if len(values) == len(lazies) and _write_later(func, args, kwargs):
            return args[0]
        # Values that are still to be computed are computed first.
        for value in values:
            value.table.note_write(value)
        return _write(func, args, kwargs)
    if len(values) == len(lazies) and not any(is_written(item) for item in lazies):
        if func in _SAME_TENSOR:
            values[0].is_shared = True
            return LazyTensor.of(values[0])
        waiting = values[0].table.defer(func, args, kwargs)
        if waiting is not None:
            return waiting
        if func is COPY:
            return _copied(args[0], kwargs)
    if returns_views(func):
        # An ordinary tensor on the same memory: writes to it are not detected here.
        for value in values:
            value.table.end_waiting(value)
    return func(*tree_map(_values_of, args), **tree_map(_values_of, kwargs))


def _may_wait(tensor: LazyTensor) -> bool:
    """Return whether operators on it may be recorded rather than run, judging by its batch."""
    batch = None if tensor._value is None or is_written(tensor) else tensor._value.batch
    return batch is not None and batch.may_wait


def _copied(tensor: LazyTensor, options: Any) -> torch.Tensor:
    """Return the result of `_to_copy`: the copy that was made ahead, or one that is made now."""
    placed = None
    if tensor._value is not None and not is_written(tensor):
        placed = tensor._value.table.placed(tensor._value, options)
    copy: torch.Tensor = COPY(plain(tensor), **options) if placed is None else placed
    return copy


def _copy_into(
    target: torch.Tensor, source: LazyTensor, non_blocking: bool = False
) -> torch.Tensor:
    """Copy `source`, which is only read: a copy of it may already be on the target's device."""
    value = source._value
    placed = None
    if value is not None and not is_written(source) and target.dtype == source.dtype:
        options = {"device": target.device, "non_blocking": non_blocking}
        placed = value.table.placed(value, options)
    return target.copy_(plain(source) if placed is None else placed, non_blocking=non_blocking)


def _record_stream(tensor: LazyTensor, stream: torch.Stream) -> None:
    """Record a stream. Despite the schema, this writes no data: torch learns of a reader."""
    if tensor._value is None:
        plain(tensor).record_stream(stream)
    else:
        tensor._value.record_stream(stream)


def _write_later(func: Any, args: Any, kwargs: Any) -> bool:
    """Defer a write, if possible.

    As long as neither the values of the tensor nor a view of it are in use, a write to it is
    equivalent to another value. Results computed from the former value keep it.
    """
    target = args[0] if args else None
    if not isinstance(target, LazyTensor) or is_written(target):
        return False
    former = target._value
    if former is None or former.is_shared or former.tensor is not None:
        return False
    twin = functional_twin(func)
    waiting = former.table.defer(twin.operator, args, kwargs) if twin is not None else None
    if twin is None or not isinstance(waiting, LazyTensor):
        return False
    value = waiting._value
    assert value is not None
    if twin.is_view_alone:
        with DisableTorchDispatch():
            func(*args, **kwargs)  # this changes the tensor's metadata
        target._meta = value.meta
    elif (value.meta.dtype, value.meta.shape, value.meta.stride()) != (
        former.meta.dtype,
        former.meta.shape,
        former.meta.stride(),
    ):
        return False  # the values would be converted, or it is an error
    value.first_version = write_count(target) + 1  # autograd counts the write when this returns
    target._value = value
    return True


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that writes, and return the tensors that its schema returns."""
    if torch.Tag.inplace_view in func.tags and isinstance(args[0], LazyTensor):
        # Other tensors may share the memory, as before.
        if args[0]._value is not None:
            args[0]._value = args[0]._value.replaced(args[0]._value.materialise().detach())
        func(plain(args[0]), *args[1:], **kwargs)
        with DisableTorchDispatch():
            func(*args, **kwargs)
        return args[0]
    made = func(*tree_map(_values_of, args), **tree_map(_values_of, kwargs))
    schema = schema_of(func)
    written = {
        frozenset(argument.alias_info.before_set): kwargs.get(argument.name)
        if place >= len(args)
        else args[place]
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    if len(schema.returns) != 1:
        return made
    alias = schema.returns[0].alias_info
    if alias is None or not alias.is_write:
        return made
    return written.get(frozenset(alias.before_set), made)


def _pickle(tensor: LazyTensor) -> Any:
    return reduce_tensor(plain(tensor))


ForkingPickler.register(LazyTensor, _pickle)


class _Running(threading.local):
    depth = 0


_running = _Running()  # per thread


def is_model_running() -> bool:
    return _running.depth > 0


def enter_model() -> None:
    """Mark the start of an offloaded model's run; call `leave_model` at its end."""
    _running.depth += 1


def leave_model() -> None:
    _running.depth -= 1


def hide_dynamo_advice() -> None:
    """Keep Dynamo's advice about offloaded models out of the log, unless TORCH_LOGS is set."""
    if not os.environ.get("TORCH_LOGS"):
        for name in ADVICE:
            logging.getLogger(name).addFilter(_is_not_advice)  # adding it again has no effect


def _is_not_advice(record: logging.LogRecord) -> bool:
    return not (is_model_running() and str(record.msg).lstrip().startswith(ADVICE[record.name]))
