# SPDX-License-Identifier: Apache-2.0
"""Plan TorchScript programs, which the native part reads, and build the programs of both sides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock import _C
from penstock.graph.constants import ConstantWatch, is_same_bits
from penstock.graph.native_plan import read_flow, read_plan
from penstock.graph.plan import Plan
from penstock.graph.planning import (
    CutOptions,
    Layout,
    PlannedCut,
    Planning,
    UncheckedBatches,
    native_refusals,
    price_plans,
)
from penstock.graph.sizes import Unlowerable

NO_STORAGE = 2**32 - 1  # of a value that is not a tensor or was not measured
KNOWN_LIBRARIES = frozenset(
    {"aten", "size", "list", "opaque", "opaque_view", "torchscript", "declared"}
)

# The conditions of a comparison: sizes, threads, whether gradients are on, whether TorchScript
# optimizes.
Setting = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Shipped:
    """One boundary tensor."""

    key: str
    operator: str
    device: str  # where the program has it


@dataclass
class ScriptCut:
    """One plan of a program, for calls of one kind. Confined to the training thread."""

    leaf_indices: list[int | None]
    call: Any  # the call that it was planned with
    program: Any
    native: Any  # the plan
    planned: PlannedCut
    boundary: list[Shipped]
    suffix: Any = None  # the version that passed the comparison
    reference: Any = None
    constants: ConstantWatch | None = None
    # The process's settings at planning time: the workers' results depend on them.
    settings: str = field(default_factory=_C.kernel_settings)
    runs: Counter[Setting] = field(default_factory=Counter)  # of the whole, by (grads, optimizes)
    layouts: dict[Setting, list[Layout]] = field(default_factory=dict)  # by setting of a comparison
    refused: set[Setting] = field(default_factory=set)
    makers: set[int] = field(default_factory=set)  # workers of which a batch was compared
    used_count: int = 0
    unchecked: UncheckedBatches = field(default_factory=UncheckedBatches)

    @property
    def raw_leaves(self) -> frozenset[int]:
        """Return the leaves of the batch that the remaining part reads."""
        return frozenset(self.native.raw_leaves)

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys of its boundary tensors."""
        return frozenset(item.key for item in self.boundary)

    def suffixes(self, is_optimized: bool) -> Iterator[tuple[Any, bool]]:
        """Yield ways to run the remaining part.

        Each has the program, and whether TorchScript is to keep small groups when it optimizes: a
        group of the whole program may be small without the calls that move.
        """
        for keeps_small_groups in (False, True) if is_optimized else (False,):
            suffix = self.program.suffix(self.native, is_optimized=is_optimized)
            yield suffix, keeps_small_groups


def plan_program(
    callee: Any, call: Any, leaf_indices: Sequence[int | None], leaf_count: int, options: CutOptions
) -> ScriptCut:
    """Read and cut a TorchScript program for calls like `call`.

    `leaf_indices` has the leaf of the batch that each tensor of the call is.

    Raises:
        Unlowerable: there is no plan; the message is the reason.
    """
    leaves = [torch.empty(0) for _ in range(leaf_count)]
    for index, tensor in zip(leaf_indices, call.tensors, strict=True):
        if index is not None:
            leaves[index] = tensor
    with native_refusals():
        program = _C.ScriptProgram(callee, call, list(leaf_indices))
        constants = program.constants
        _refuse_effects(program.graph)
        graph, devices = _C.place_on_devices(program.graph, leaves, constants)
        leaves = _on_host(leaves)
        plans = price_plans(graph, leaves, _held(graph, constants), _planning(options))
        prefix = _C.extract_prefix(graph, plans.chosen, settings=_C.kernel_settings())
    plan = _plan_of_program(graph, plans)
    if not prefix.output_keys:
        return ScriptCut(list(leaf_indices), call, program, plans.chosen, PlannedCut(plan, []), [])
    labels = plans.chosen.moved_labels(graph)
    boundary = [
        Shipped(key, labels[name], devices.get(name, "cpu"))
        for name, key in zip(prefix.output_names, prefix.output_keys, strict=True)
    ]
    taken = [graph.held_names.index(name) for name in prefix.constant_names]
    tensors = [constants[index] for index in taken]
    with native_refusals():
        suffix = program.suffix(plans.chosen)
        reference = program.reference(plans.chosen)
    planned = PlannedCut(plan, [], prefix=str(prefix), prefix_constants=tuple(_on_host(tensors)))
    cut = ScriptCut(
        list(leaf_indices),
        call,
        program,
        plans.chosen,
        planned,
        boundary,
        suffix,
        reference,
        ConstantWatch(dict(zip(taken, tensors, strict=True))),
    )
    _check_fidelity(cut, callee, leaves)
    return cut


def _refuse_effects(graph: _C.Graph) -> None:
    """Raise Unlowerable for operators that may have side effects.

    The comparison runs the remaining part once more.
    """
    for operator in sorted(graph.operators):
        library, _, name = operator.partition("::")
        if library not in KNOWN_LIBRARIES:
            raise Unlowerable(
                f"the module uses {library}::{name}, which may do more than compute, so it cannot "
                "be run once more to compare; an operator that only computes is declared by "
                "penstock.stateless"
            )


def plan_script(model: Any, leaves: Sequence[torch.Tensor], options: CutOptions) -> Plan:
    """Return the plan of a TorchScript module or function whose arguments are `leaves`.

    Raises:
        Unlowerable: there is no plan; the message is the reason.
    """
    with native_refusals():
        if isinstance(model, torch.jit.ScriptModule):
            captured, constants = _C.capture_torchscript(model, list(leaves))
        else:
            call = _C.ScriptCall(model, tuple(leaves), {})
            program = _C.ScriptProgram(model, call, list(range(len(leaves))))
            captured, constants = program.graph, program.constants
        graph, _ = _C.place_on_devices(captured, list(leaves), constants)
        held = _held(graph, constants)
        plans = price_plans(graph, _on_host(leaves), held, _planning(options))
        return _plan_of_program(graph, plans)


def _plan_of_program(graph: _C.Graph, plans: _C.PricedPlans) -> Plan:
    """Return the plan of a program as a Plan."""
    # A call that cannot move was not run, so the sizes of its results are unknown.
    extents = {
        name: (size.bytes, size.storage)
        for name, size in zip(graph.value_names, plans.calibration.values, strict=True)
        if size.storage != NO_STORAGE
    }
    return read_plan(plans, read_flow(graph, extents))


def _on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().cpu() for tensor in tensors]


def _held(graph: _C.Graph, constants: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the constants on the CPU, with None for state: it is not run for a plan."""
    kinds = [one.kind for one in graph.inputs if one.kind in ("const", "state")]
    return [
        tensor.detach().cpu() if kind == "const" else None
        for kind, tensor in zip(kinds, constants, strict=True)
    ]


def _planning(options: CutOptions) -> Planning:
    """Keep random draws in the trainer: TorchScript draws in the order of its program."""
    return Planning(replace(options, allow_random=False))


def _check_fidelity(cut: ScriptCut, callee: Any, leaves: list[torch.Tensor]) -> None:
    """Compare the prefix with its original calls on this very batch, bit for bit."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        with native_refusals():
            executor = _C.Executor(
                _C.parse_graph(cut.planned.prefix), list(cut.planned.prefix_constants)
            )
            made = executor.run(leaves)
        expected = cut.reference.run(callee, cut.call)
    for item, value, reference in zip(cut.boundary, made, expected, strict=True):
        if not is_same_bits(value, reference.cpu()):
            raise Unlowerable(f"{item.operator} returns other bits in a worker than in the trainer")
