# SPDX-License-Identifier: Apache-2.0
"""Explain models that have no values yet: their parameters and buffers are on the meta device.

Large models are built this way: `with torch.device("meta")`. Their stand-in is a copy of the
modules, with a fake tensor for each tensor on the meta device, which has a shape and a real
device, and no memory either. All other tensors are the model's own. Calls that read no fake tensor
run on the batch for real, for their prices and their bits; the results of all others are fake.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from penstock.compat.fake_tensors import DataDependentOutputException, FakeTensor, FakeTensorMode
from penstock.compat.operators import tree_leaves
from penstock.cut.cut_context import modules_of
from penstock.graph.capture import first_sentence
from penstock.graph.sizes import Unlowerable

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_GIVE_VALUES = 'call model.to_empty(device="cpu") and initialise or load it first'


def refuse_absent_batch(leaves: Sequence[torch.Tensor]) -> None:
    """Raise Unlowerable for a batch without values."""
    absent = next((leaf for leaf in leaves if leaf.is_meta), None)
    if absent is not None:
        raise Unlowerable(
            f"the tensors of the batch must be on the CPU, got one on the meta device "
            f"({_format(absent)}); pass a batch as the loader delivers it: only the model may be "
            f"without values"
        )
    if torch.get_default_device().type == "meta":
        raise Unlowerable(
            "the default device must be a real one, got meta, so forward would make tensors "
            'without values; call explain after the `with torch.device("meta")` block'
        )


def stand_in_for(model: Any) -> Any:
    """Return the model, or a copy with fake tensors in place of those on the meta device.

    Raises Unlowerable, with the reason, if there can be no such copy.
    """
    if not isinstance(model, torch.nn.Module):
        for module in modules_of(model):
            absent = next(_absent(module), None)
            if absent is not None:
                raise Unlowerable(
                    f"the {type(module).__name__} that the function calls must have values, got "
                    f"{absent[0]} on the meta device; pass the model itself, and the function as "
                    f"call=lambda model, batch: ..."
                )
        return model
    absents = dict(_absent(model))
    if not absents:
        return model
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = _device_of(model)
    memo: dict[int, Any] = {id(tensor): tensor for _, tensor in _tensors(model)}
    for name, tensor in absents.items():
        if type(tensor) not in _PLAIN:
            raise Unlowerable(
                f"a tensor on the meta device must be a plain tensor, got {name}, a "
                f"{type(tensor).__name__}; explain the model before it is sharded or converted"
            )
        fake = FakeTensor(mode, tensor.detach(), device)
        if isinstance(tensor, torch.nn.Parameter):
            memo[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad)
        else:
            memo[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise Unlowerable(
            f"a model with tensors on the meta device is explained as a copy, and this one cannot "
            f"be copied ({first_sentence(error)}); {_GIVE_VALUES}"
        ) from error


def deep_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model that shares its fake tensors, which no run can change."""
    fakes = {id(one): one for _, one in _tensors(model) if isinstance(one, FakeTensor)}
    return copy.deepcopy(model, fakes)


def reads_absent_values(error: Exception) -> str | None:
    """Return the reason if a run failed because it needed a number from a fake tensor."""
    if not isinstance(error, DataDependentOutputException):
        return None
    return (
        f"forward reads a number ({error.func}) that depends on values on the meta device; "
        f"{_GIVE_VALUES}"
    )


def _absent(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor) for name, tensor in _tensors(module) if _is_absent(tensor))


def _is_absent(tensor: torch.Tensor) -> bool:
    # A lazy module's parameter has no shape yet: Dynamo gives the reason.
    return tensor.is_meta and not torch.nn.parameter.is_lazy(tensor)


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, buffers, and tensors that are attributes or in a container that is one."""
    for prefix, part in module.named_modules():
        own: dict[str, Any] = {**vars(part), **part._parameters, **part._buffers}
        for registry in ("_parameters", "_buffers", "_modules"):
            own.pop(registry, None)
        for name, value in own.items():
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    yield f"{prefix}.{name}" if prefix else name, leaf


def _device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of the parameters that have values; the CPU if there is not exactly one."""
    real = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    return real.pop() if len(real) == 1 else torch.device("cpu")


def _format(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
