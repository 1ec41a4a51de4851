# SPDX-License-Identifier: Apache-2.0
"""Print a lowering as text of the intermediate representation.

`csrc/graph/ir_text.h` has the grammar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from penstock import _C
from penstock.graph.capture import call_label, format_source, source_line
from penstock.graph.lowering import Lowering
from penstock.graph.recording import Form, Name, RecordedOp
from penstock.graph.sizes import Unlowerable, expression_of, fold, has_unknown

SIZE_OPERATORS = {
    "add": "size::add",
    "mul": "size::mul",
    "floordiv": "size::floordiv",
    "mod": "size::mod",
    "max": "size::max",
    "min": "size::min",
}
# Keyword arguments that a worker's operator does not accept.
_DEVICE_ARGUMENTS = ("device", "non_blocking", "pin_memory")
LABEL_CHARACTERS_MAX = 200
QUOTED_BYTES_MAX = 4096


@dataclass(frozen=True)
class Emission:
    """The text, and the tensors of its constants by name, in the order in which it names them."""

    text: str
    constants: dict[str, torch.Tensor]
    held: list[torch.Tensor | None]  # the same, with None in the position of each state input
    nodes: list[int]  # node of each recorded operator
    placed: set[Name]  # unchanged tensors of the batch on a device


def emit(lowering: Lowering, arguments: Sequence[Any]) -> Emission:
    """Print `lowering` for the graph inputs `arguments`; the text has digests of the constants."""
    return _Printer(lowering, arguments).print()


class _Printer:
    def __init__(self, lowering: Lowering, arguments: Sequence[Any]) -> None:
        self._lowering = lowering
        self._arguments = arguments
        self._forms = lowering.recording.forms
        self._placed: set[Name] = set()
        self._lines: list[str] = ["penstock-ir 1"]
        self._operator_lines: list[int] = []
        self._constants: dict[str, torch.Tensor] = {}
        self._held: list[torch.Tensor | None] = []
        self._symbols = {b.symbol: f"s{i}" for i, b in enumerate(lowering.conditions.bindings)}
        self._size_names: dict[sympy.Symbol, str] = {}
        self._size_count = 0
        self._state_storages = lowering.recording.mutated_storages

    def print(self) -> Emission:
        self._inputs()
        for binding in self._lowering.conditions.bindings:
            name = f"%n{len(self._size_names)}"
            self._size_names[binding.symbol] = name
            leaf = f"%x{binding.input_index}"
            self._lines.append(f'input {name} int "size of {leaf}" = {leaf}.size({binding.dim})')
        labels = self._unit_labels()
        first_line = len(self._lines)
        for op in self._lowering.recording.ops:
            self._operator(op, labels)
        for output in dict.fromkeys(self._lowering.output_names):
            self._lines.append(f"output {output}")
        return Emission(
            "\n".join(self._lines) + "\n",
            self._constants,
            self._held,
            [line - first_line for line in self._operator_lines],
            self._placed,
        )

    def _inputs(self) -> None:
        lowering = self._lowering
        for name, index in lowering.input_names.items():
            item = lowering.inputs[index]
            form = lowering.recording.forms[name]
            tensor = f"{dtype_name(form.dtype)} {self._dims(form.sizes)}"
            if item.kind == "leaf":
                self._lines.append(f"input {name} leaf {item.leaf_index} {tensor}")
            elif item.kind == "const" and form.storage not in self._state_storages:
                self._constant(name, format_source(item.label), self._arguments[index])
            else:
                source = quoted(format_source(item.label))
                self._held.append(None)
                self._lines.append(f"input {name} state {source} {tensor}")
        for name, value in lowering.attributes.items():
            self._constant(name, "attribute of the graph", value)
        for name, value in lowering.recording.literals.items():
            self._constant(name, "literal", value)

    def _constant(self, name: Name, label: str, tensor: torch.Tensor) -> None:
        tensor = tensor.detach().cpu()  # as workers hold it
        self._constants[str(name)] = tensor
        self._held.append(tensor)
        self._lines.append(
            f"input {name} const {quoted(label)} {dtype_name(tensor.dtype)} "
            f"[{', '.join(map(str, tensor.shape))}] digest {quoted(_C.content_digest(tensor))}"
        )

    def _dims(self, shape: Sequence[Any]) -> str:
        dims: list[str] = []
        for size in shape:
            expression = expression_of(size, self._lowering.shape_env)
            if isinstance(expression, int):
                dims.append(str(expression))
            elif expression in self._symbols:
                dims.append(self._symbols[expression])
            else:
                raise Unlowerable(f"a batch tensor has an unknown size, {expression}")
        return f"[{', '.join(dims)}]"

    def _unit_labels(self) -> dict[int, str]:
        """Return one label per unit: its calls and their source lines."""
        members: dict[int, list[Any]] = {}
        for node, unit in zip(self._lowering.nodes, self._lowering.unit_of, strict=True):
            if node not in self._lowering.droppable:
                members.setdefault(unit, []).append(node)
        labels: dict[int, str] = {}
        for unit, nodes in members.items():
            names = [call_label(node).partition(" at ")[0] for node in nodes]
            line = source_line(nodes[-1])
            labels[unit] = ", ".join(names) + (f" at {line}" if line else "")
        return labels

    def _operator(self, op: RecordedOp, labels: dict[int, str]) -> None:
        unit = self._lowering.unit_of[op.call_index]
        suffix = f" group {unit} {quoted(labels.get(unit, '')[:LABEL_CHARACTERS_MAX])}"
        place = source_line(self._lowering.nodes[op.call_index])
        if place:
            suffix += f" at {quoted(place[:LABEL_CHARACTERS_MAX])}"
        device = self._device_of(op)
        target, kwargs = op.target, op.kwargs
        if device is not None:
            target, kwargs = self._on_host(op)
        try:
            parts = [self._argument(arg, suffix) for arg in op.args]
            parts += [f"{k}={self._argument(v, suffix)}" for k, v in kwargs.items()]
        except Unlowerable:
            # The operator takes an argument without a text form (a generator, a complex number), so
            # it stays.
            target = "unwritable::" + op.target.partition("::")[2].replace(".", "_")
            parts = [str(name) for name in _names_in([op.args, list(op.kwargs.values())])]
            device = None
        if device is not None:
            suffix = f" on {device} [{', '.join(self._operand_forms(op, kwargs))}]{suffix}"
        results = ", ".join(str(name) for name in op.outputs)
        self._operator_lines.append(len(self._lines))
        self._lines.append(
            f"{results}{' = ' if results else ''}{target}({', '.join(parts)}){suffix}"
        )

    def _forms_of(self, op: RecordedOp) -> list[Form]:
        return [self._forms[name] for name in op.outputs if name in self._forms]

    def _device_of(self, op: RecordedOp) -> torch.device | None:
        """Return the device, other than the CPU, that an operator works on."""
        if not op.target.startswith(("aten::", "declared::", "prims::")):
            return None
        made = self._forms_of(op)
        if not made:
            # The operands may be in a list of tensors.
            names = _names_in([op.args, list(op.kwargs.values())])
            made = [self._forms[name] for name in names if name in self._forms]
        return next((form.device for form in made if form.device.type != "cpu"), None)

    def _on_host(self, op: RecordedOp) -> tuple[str, dict[str, Any]]:
        """Return the same operator as a worker runs it."""
        kwargs = {
            k: v for k, v in op.kwargs.items() if k not in _DEVICE_ARGUMENTS and v is not None
        }
        if op.target == "aten::_to_copy" and isinstance(op.args[0], Name):
            source, made = self._forms[op.args[0]], self._forms[op.outputs[0]]
            is_alike = (source.dtype, source.strides) == (made.dtype, made.strides)
            if is_alike and source.device != made.device:
                if op.args[0] in self._placed or self._is_leaf(op.args[0]):
                    self._placed.add(op.outputs[0])
                return "aten::alias", {}
        return op.target, kwargs

    def _is_leaf(self, name: Name) -> bool:
        index = self._lowering.input_names.get(name)
        return index is not None and self._lowering.inputs[index].kind == "leaf"

    def _operand_forms(self, op: RecordedOp, kwargs: dict[str, Any]) -> list[str]:
        """Return the dtype of each operand value, and whether it is on the host."""
        found: list[str] = []
        for value in _values_in([op.args, list(kwargs.values())]):
            form = self._forms.get(value) if isinstance(value, Name) else None
            if form is None:
                found.append("int")
            else:
                found.append(f"{'cpu ' * (form.device.type == 'cpu')}{dtype_name(form.dtype)}")
        return found

    def _argument(self, value: Any, suffix: str) -> str:
        if isinstance(value, Name):
            return str(value)
        if isinstance(value, sympy.Basic):
            return self._size(value, suffix)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._argument(item, suffix) for item in value)}]"
        return literal(value)

    def _size(self, expression: sympy.Basic, suffix: str) -> str:
        def binary(op: str, a: str, b: str) -> str:
            name = f"%e{self._size_count}"
            self._size_count += 1
            self._lines.append(f"{name} = {SIZE_OPERATORS[op]}({a}, {b}){suffix}")
            return name

        if has_unknown(expression):
            raise Unlowerable(f"the size {expression} depends on the values of a tensor")
        return fold(expression, lambda symbol: self._size_names[symbol], str, binary)


def _values_in(value: Any) -> list[Any]:
    """Return the values by name, including sizes that become values: expressions of symbols do."""
    if isinstance(value, Name) or (isinstance(value, sympy.Basic) and not value.is_number):
        return [value]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in _values_in(item)]
    return []


def _names_in(value: Any) -> list[Name]:
    return [found for found in _values_in(value) if isinstance(found, Name)]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def literal(value: Any) -> str:
    """Return one argument that is not a value, in the spelling of the grammar."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise Unlowerable(f"the integer {value} has more than 64 bits")
        return str(value)
    if isinstance(value, float):
        if math.isnan(value):
            return "nan"
        if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        return repr(value)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, torch.dtype):
        return f"dtype:{dtype_name(value)}"
    if isinstance(value, torch.layout):
        return f"layout:{str(value).removeprefix('torch.')}"
    if isinstance(value, torch.memory_format):
        return f"memory_format:{str(value).removeprefix('torch.')}"
    if isinstance(value, torch.device):
        return f"device:{value}"
    raise Unlowerable(f"a {type(value).__name__} cannot be written in the text of a prefix")


def quoted(text: str) -> str:
    """Return the text in quotes, with the grammar's escapes, truncated to its limit."""
    out: list[str] = []
    for byte in text.encode("utf-8", "replace")[: QUOTED_BYTES_MAX // 4]:
        character = chr(byte)
        if character in '"\\':
            out.append("\\" + character)
        elif 0x20 <= byte < 0x7F:
            out.append(character)
        else:
            out.append(f"\\x{byte:02x}")
    return f'"{"".join(out)}"'
