# SPDX-License-Identifier: Apache-2.0
"""Planning happens while the user waits for the first batch, so it is fast for large models too.

Whether a plan is the cheapest is tested in C++, against brute force (`plan_test.cpp`).
"""

from __future__ import annotations

import random
import time

import pytest
import torch

from penstock import _C

OPERATORS = 5_000
SECONDS_MAX = 60.0  # many times the usual time; quadratic growth takes longer
SCALE = torch.linspace(0.5, 1.5, 8)


def tangled_graph(rng: random.Random) -> str:
    """Operators that read results of up to thirty operators before; the last third now and then
    reads a parameter."""
    lines = [
        "penstock-ir 1",
        "input %x0 leaf 0 float32 [4, 8]",
        f'input %c1 const "scale" float32 [8] digest "{_C.content_digest(SCALE)}"',
        'input %p2 state "weight" float32 [8]',
    ]
    values = ["%x0"]
    for index in range(OPERATORS):
        first, second = (rng.choice(values[-30:]) for _ in range(2))
        if index > OPERATORS * 2 // 3 and index % 51 == 0:
            second = "%p2"
        elif index % 9 == 0:
            second = "%c1"
        call = f"aten::add.Tensor({first}, {second})" if index % 2 else f"aten::tanh({first})"
        values.append(f"%v{index}")
        lines.append(f'{values[-1]} = {call} group {index} "call {index}"')
    lines += [f"output {values[-1]}", f"output {values[OPERATORS // 2]}"]
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["maximal", "auto"])
def test_planning_five_thousand_operators_is_fast(cut: str, seed: int) -> None:
    text = tangled_graph(random.Random(seed))
    start = time.process_time()
    graph = _C.parse_graph(text)
    graph.annotate()
    verdicts = _C.analyse_effects(graph)
    calibration = _C.calibrate(graph, verdicts, [torch.ones(4, 8)], [SCALE, None], round_count=1)
    # A slow link, so that the choice of the cut matters.
    prices = _C.Prices(link_bytes_per_s=1e6)
    plan = _C.make_plan(graph, verdicts, calibration, cut=cut, prices=prices)
    prefix = _C.extract_prefix(graph, plan)
    seconds = time.process_time() - start
    print(f"{OPERATORS} operators, {len(plan.moved)} of them moved: {seconds:.3f} s")
    assert len(plan.moved) + len(plan.kept) == OPERATORS
    assert prefix.output_names or not plan.moved
    assert seconds < SECONDS_MAX
