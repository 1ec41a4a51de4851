# SPDX-License-Identifier: Apache-2.0
"""A call of a model that is to be explained, and its arguments that are of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.graph.capture import LeafLookup
from penstock.seams.dynamo import is_skipped, wrap_inline
from penstock.seams.modules import module_call


def forward_call(model: Any) -> Callable[..., Any]:
    """The model's call without the functions that `model.compile` or `offload` put in front of
    it."""
    if not isinstance(model, torch.nn.Module):
        return model  # type: ignore[no-any-return]
    if is_skipped(model.forward):
        # Dynamo leaves frames of torch.nn alone, such as Sequential's, unless they are called from
        # one that it captures.
        return wrap_inline(module_call(model))
    return module_call(model)


@dataclass(frozen=True, slots=True)
class ExplainedCall:
    """`module_call(model)(*args, **kwargs)`, where `model` may be a copy."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    leaf_index_of: LeafLookup  # which tensor of the batch one is, None where it is another
    leaf_count: int  # of the batch
    call_of: Callable[[Any], Callable[..., Any]] = forward_call
