# SPDX-License-Identifier: Apache-2.0
"""From a captured graph to the text of the intermediate representation.

A `Lowering` knows the captured graph call by call (as Dynamo saw it and the trainer runs it) and
operator by operator (as a worker can run it), and how the two hang together: which call made which
value (`homes`), the values that every call reads (`reads`), and which calls move together
(`unit_of`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from penstock.graph.autocast import AutocastState, autocast_put_back
from penstock.graph.call_recorder import CallNotes, Home
from penstock.graph.graph_inputs import GraphInput, fake_inputs
from penstock.graph.recording import Name, Recorder, Recording, WholeOperators
from penstock.graph.refusals import refuse_by_construction
from penstock.graph.sizes import SizeConditions, Unlowerable
from penstock.seams.fake_tensors import LOGGER, FakeTensorMode


@dataclass
class Lowering:
    """A captured graph, written down. Nothing in it depends on the values of any tensor."""

    graph_module: fx.GraphModule
    inputs: list[GraphInput]
    recording: Recording
    conditions: SizeConditions
    shape_env: ShapeEnv | None
    nodes: list[fx.Node]
    reads: dict[fx.Node, dict[fx.Node, Any]]  # by call and argument, with names for tensors
    homes: dict[Name, Home]
    input_names: dict[Name, int]
    droppable: set[fx.Node]
    unit_of: list[int]
    output_names: list[Name]
    attributes: dict[Name, torch.Tensor]  # tensors that the graph module itself holds
    given: dict[Name, int]  # computed in front of the captured calls, and at hand as that input
    waiting: set[Name]  # inputs of the captured calls that nobody has computed yet
    in_front: set[fx.Node]  # the calls that are
    regions: dict[fx.Node, fx.Node]  # under autocast: where each ends, by where it begins
    autocast: AutocastState


def lower(
    graph_module: fx.GraphModule,
    inputs: Sequence[GraphInput],
    examples: Sequence[Any],
    *,
    symbolic: bool = True,
    given: Mapping[fx.Node, int] | None = None,
    in_front: Set[fx.Node] = frozenset(),
    waiting: Set[fx.Node] = frozenset(),
) -> Lowering:
    """Writes `graph_module` down for inputs like `examples`. Raises Unlowerable with the reason.

    With `symbolic`, dimensions of leaves that Dynamo treats as dynamic stay symbols; without, every
    size is the example's, and the conditions say so. `given`, `in_front` and `waiting` are those of
    an ExtendedGraph.
    """
    refuse_by_construction(graph_module)
    shape_env = ShapeEnv(specialize_zero_one=True) if symbolic else None
    mode = FakeTensorMode(shape_env=shape_env)
    mode.cache_enabled = False  # torch's cache of results keeps the symbols of each plan
    mode.allow_scalar_outputs = symbolic  # a number read from a tensor is one that nobody knows
    arguments, conditions = fake_inputs(mode, inputs, examples, symbolic)
    recorder = Recorder(shape_env)
    input_names: dict[Name, int] = {}
    for index, (item, value) in enumerate(zip(inputs, arguments, strict=True)):
        if isinstance(value, torch.Tensor):
            prefix = {"leaf": "x", "const": "c", "state": "p", "int": "s"}[item.kind]
            name = Name(f"%{prefix}{index}")
            recorder.name_input(value, name)
            input_names[name] = index
    notes = CallNotes(graph_module, recorder, mode, given or {}, waiting)
    with (
        _quiet(),
        autocast_put_back(),
        torch.inference_mode(False),
        mode,
        recorder,
        WholeOperators(recorder),
    ):
        try:
            notes.run(*arguments)
        except Unlowerable:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines()
            raise Unlowerable(
                f"{notes.present_call()} cannot be written down: "
                f"{type(error).__name__}: {reason[0] if reason else ''}"
            ) from error
    if shape_env is not None:
        conditions.guards = [guard.expr for guard in shape_env.guards]
    return Lowering(
        graph_module=graph_module,
        inputs=list(inputs),
        recording=recorder.recording,
        conditions=conditions,
        shape_env=shape_env,
        nodes=notes.nodes,
        reads=notes.reads,
        homes=notes.homes,
        input_names=input_names,
        droppable=notes.droppable,
        unit_of=_join(len(notes.nodes), recorder.recording.fused_calls),
        output_names=notes.output_names,
        attributes=notes.attributes,
        given=notes.given,
        waiting=notes.waiting,
        in_front=set(in_front),
        regions=notes.regions,
        autocast=AutocastState.now(),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps out of the user's log torch's message about an operator that takes no symbolic sizes:
    it is tried again without."""
    logger = logging.getLogger(LOGGER)

    def is_another(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("failed while attempting to run meta")

    logger.addFilter(is_another)
    try:
        yield
    finally:
        logger.removeFilter(is_another)


def _join(call_count: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers the calls so that joined ones have the same number, the smallest of them."""
    unit_of = list(range(call_count))

    def root(index: int) -> int:
        while unit_of[index] != index:
            index = unit_of[index]
        return index

    for a, b in pairs:
        low, high = sorted((root(a), root(b)))
        unit_of[high] = low
    return [root(index) for index in range(call_count)]
