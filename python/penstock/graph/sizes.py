# SPDX-License-Identifier: Apache-2.0
"""Handle sizes that are unknown until a batch arrives.

Dynamo makes a dimension symbolic once it has seen two values of it. Lowering then runs under a
separate shape environment, so that its assumptions about a size never become guards of the user's
program; the assumptions are kept here instead and checked for every new combination of sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from penstock import _C
from penstock.compat.fake_tensors import (
    CleanDiv,
    FloorDiv,
    Max,
    Min,
    Mod,
    PythonMod,
    SymT,
    symbol_is_type,
)

T = TypeVar("T")

# How many combinations of sizes a table of layouts holds before it is cleared, and of how many
# workers a cut remembers that a batch was compared.
REMEMBERED_SIZES = 4096
REMEMBERED_MAKERS = 4096


class Unlowerable(Exception):
    """A construct has no faithful form in the text of a prefix; the message is the reason."""


class Unrunnable(Unlowerable):
    """A graph would give other results than eager if the trainer ran it as Dynamo recorded it."""


@dataclass(frozen=True)
class SizeBinding:
    """The dimension of an input of the captured graph that a symbol represents."""

    symbol: sympy.Symbol
    input_index: int
    dim: int


@dataclass
class SizeConditions:
    """The conditions on the inputs' sizes under which a lowering is valid."""

    bindings: list[SizeBinding]
    guards: list[sympy.Basic]
    fixed_sizes: list[tuple[int, int, int]] = field(default_factory=list)  # input, dim, size
    fixed_ints: list[tuple[int, int]] = field(default_factory=list)  # input, value
    strides: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)  # input, strides
    _native: _C.InputConditions | None = None  # set once the conditions are complete

    def hold(self, inputs: Sequence[Any]) -> bool:
        """Return whether the lowering of these conditions may be used for `inputs`."""
        if self._native is None:
            self._native = self._to_native()
        return self._native.hold(inputs)

    def sizes(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Return the value of every symbol for these inputs, in the order of `bindings`."""
        return tuple(inputs[b.input_index].shape[b.dim] for b in self.bindings)

    def values(self, sizes: Sequence[int]) -> dict[sympy.Symbol, sympy.Integer]:
        return {b.symbol: sympy.Integer(size) for b, size in zip(self.bindings, sizes, strict=True)}

    def _to_native(self) -> _C.InputConditions:
        """Return the conditions as csrc/graph/size_ops.h takes them, for checks of every
        call.

        A guard without such a form is checked here, once for each combination of sizes.
        """
        places = {binding.symbol: place for place, binding in enumerate(self.bindings)}
        guards: list[NativeExpression] = []
        unusual: list[sympy.Basic] = []
        for guard in self.guards:
            try:
                guards.append(_native_condition(guard, places))
            except Unlowerable:
                unusual.append(guard)

        def hold(sizes: Sequence[int]) -> bool:
            values = self.values(sizes)
            return all(guard.xreplace(values) == sympy.true for guard in unusual)

        return _C.InputConditions(
            symbols=[(binding.input_index, binding.dim) for binding in self.bindings],
            fixed_sizes=self.fixed_sizes,
            fixed_ints=self.fixed_ints,
            guards=guards,
            strides=[
                (index, [_native_size(expression_of(stride, None), places) for stride in strides])
                for index, strides in self.strides
            ],
            unusual=hold if unusual else None,
        )


# An integer, ("symbol", place), or an operator's name and its operands.
NativeExpression = int | tuple[Any, ...]

_COMPARISONS = {
    sympy.Equality: "eq",
    sympy.Unequality: "ne",
    sympy.StrictLessThan: "lt",
    sympy.LessThan: "le",
    sympy.StrictGreaterThan: "gt",
    sympy.GreaterThan: "ge",
}
_CONNECTIVES = {sympy.And: "and", sympy.Or: "or", sympy.Not: "not"}


def _native_condition(guard: sympy.Basic, places: Mapping[sympy.Symbol, int]) -> NativeExpression:
    """Convert a guard; raise Unlowerable if it compares other things than integers."""
    if guard in (sympy.true, sympy.false):
        return int(bool(guard))
    if type(guard) in _CONNECTIVES:
        operands = [_native_condition(part, places) for part in guard.args]
        return (_CONNECTIVES[type(guard)], *operands)
    if type(guard) in _COMPARISONS:
        left, right = (_native_size(side, places) for side in guard.args)
        return (_COMPARISONS[type(guard)], left, right)
    raise Unlowerable(f"the condition {guard} on sizes has no native equivalent")


def _native_size(size: int | sympy.Basic, places: Mapping[sympy.Symbol, int]) -> NativeExpression:
    if isinstance(size, int):
        return size

    def symbol(of: sympy.Symbol) -> NativeExpression:
        if of not in places:
            raise Unlowerable(f"the size {of} is not a size of an input")
        return ("symbol", places[of])

    def literal(number: int) -> NativeExpression:
        return number

    def binary(operator: str, a: NativeExpression, b: NativeExpression) -> NativeExpression:
        return (operator, a, b)

    return fold(size, symbol, literal, binary)


def evaluate(value: Any, values: dict[sympy.Symbol, sympy.Integer]) -> int:
    """Return a size or stride, which may be symbolic, for one combination of sizes."""
    expression = expression_of(value, None)
    return expression if isinstance(expression, int) else int(expression.xreplace(values))


def expression_of(value: Any, shape_env: ShapeEnv | None) -> int | sympy.Basic:
    """Return the expression behind an int or SymInt; an int if the expression is constant."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    expression = value.node.expr
    if shape_env is not None:
        expression = shape_env.simplify(expression)
    return int(expression) if expression.is_Integer else expression


def has_unknown(expression: Any) -> bool:
    """Return whether a size's expression has a number that depends on the values of a tensor."""
    return isinstance(expression, sympy.Basic) and any(
        symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))
        for symbol in expression.free_symbols
    )


BinaryEmitter = Callable[[str, T, T], T]


def fold(
    expression: sympy.Basic,
    symbol: Callable[[sympy.Symbol], T],
    literal: Callable[[int], T],
    binary: BinaryEmitter[T],
) -> T:
    """Rebuild an integer expression.

    It may consist of symbols, integers and the operators add, mul, floordiv, mod, max and min.
    Raises Unlowerable for any other part.
    """

    def chain(operator: str, parts: Sequence[sympy.Basic]) -> T:
        result = visit(parts[0])
        for part in parts[1:]:
            result = binary(operator, result, visit(part))
        return result

    def visit(e: sympy.Basic) -> T:
        if isinstance(e, sympy.Symbol):
            return symbol(e)
        if isinstance(e, sympy.Integer):
            return literal(int(e))
        if isinstance(e, sympy.Add):
            return chain("add", e.args)
        if isinstance(e, sympy.Mul) and all(part.is_integer for part in e.args):
            return chain("mul", e.args)
        if isinstance(e, sympy.Pow) and isinstance(e.exp, sympy.Integer) and 1 <= e.exp <= 8:
            return chain("mul", [e.base] * int(e.exp))
        if isinstance(e, (FloorDiv, CleanDiv)):
            return chain("floordiv", e.args)
        if isinstance(e, (Mod, PythonMod)):
            return chain("mod", e.args)
        if isinstance(e, Max):
            return chain("max", e.args)
        if isinstance(e, Min):
            return chain("min", e.args)
        raise Unlowerable(f"the size {expression} cannot be written in the text of a prefix")

    return visit(expression)
