# SPDX-License-Identifier: Apache-2.0
"""`stateless`: the user's word that an operator of another library only computes."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from penstock.seams.operators import (
    CustomOpDef,
    OpOverload,
    OpOverloadPacket,
    overload_of,
    schema_of,
)

Op = TypeVar("Op")

_DECLARED = "_penstock_is_stateless"


def stateless(operator: Op) -> Op:
    """Declares that `operator` gives the same result for the same arguments and does nothing else;
    returns it.

    An operator of a library that penstock does not know stays in the trainer. One that is declared
    may be moved into the workers like one of torch's own: it reads no state, draws no random
    numbers, writes to nothing, and its results share no memory with its arguments. Batches are
    compared with the trainer's own at times, which shows a wrong declaration, though not at once.
    Spawned workers need the operator, too: define it in a module that the dataset's imports.

    `operator` is a result of `torch.library.custom_op`, or one of `torch.ops`. Raises TypeError for
    anything else and ValueError when its schema says otherwise.

    Example::

        @penstock.stateless
        @torch.library.custom_op("mylib::companded", mutates_args=())
        def companded(wave: torch.Tensor, mu: float) -> torch.Tensor:
            return wave.sign() * torch.log1p(mu * wave.abs()) / math.log1p(mu)
    """
    for overload in _overloads(operator):
        _check(overload)
        setattr(overload, _DECLARED, True)
    return operator


def is_declared(overload: OpOverload) -> bool:
    """Whether `overload` was declared to be stateless."""
    return bool(getattr(overload, _DECLARED, False))


def _overloads(operator: Any) -> list[OpOverload]:
    if isinstance(operator, CustomOpDef):
        return [overload_of(operator)]
    if isinstance(operator, OpOverload):
        return [operator]
    if isinstance(operator, OpOverloadPacket):
        return [getattr(operator, name) for name in operator.overloads()]
    raise TypeError(
        f"stateless was given a {type(operator).__name__}, where an operator was expected; pass "
        f"what torch.library.custom_op makes, or one of torch.ops"
    )


def _check(overload: OpOverload) -> None:
    schema = schema_of(overload)
    aliases = [item for item in (*schema.arguments, *schema.returns) if item.alias_info is not None]
    if schema.is_mutable:
        reason = "writes to its arguments"
    elif aliases:
        reason = "returns memory of its arguments"
    elif torch.Tag.nondeterministic_seeded in overload.tags:
        reason = "draws random numbers"
    else:
        return
    raise ValueError(
        f"stateless was given {schema.name}, which {reason} as its schema says ({schema}); an "
        f"operator without effects was expected: leave it undeclared, and it stays in the trainer"
    )
