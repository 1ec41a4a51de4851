# SPDX-License-Identifier: Apache-2.0
"""Offloading a model logs no advice on compiling."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from penstock.tracking.lazy_tensor import enter_model, hide_dynamo_advice, leave_model

CHANGES = """
import torch
from in_process_pool import InProcessPool
from penstock.cut.offloading import offload

class Changing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.net(x / x.abs().max().item() * self.calls)

pool = InProcessPool([])
model = offload(Changing(), pool, cut="maximal")
for _ in range(12):
    model(pool.deliver(torch.randn(3, 4)))
"""


@pytest.mark.long("True")
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("is_asked", [False, True])
def test_dynamo_advice_is_logged_only_with_torch_logs(is_asked: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("TORCH_LOGS", None)
    if is_asked:
        environment["TORCH_LOGS"] = "graph_breaks"
    ran = subprocess.run(
        [sys.executable, "-c", CHANGES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert ("consider setting" in ran.stderr) == is_asked
    assert "hit config.recompile_limit" not in ran.stderr  # a model is given up before that
    ours = [line for line in ran.stderr.splitlines() if line.startswith("penstock: ")]
    assert len(ours) == 1 and "Dynamo has captured a part of its forward 8 times" in ours[0]
    assert is_asked or ran.stderr.splitlines() == ours


def test_dynamo_advice_for_other_models_is_kept() -> None:
    hide_dynamo_advice()
    logger = logging.getLogger("torch._dynamo.convert_frame")

    def is_logged(message: str) -> bool:
        record = logger.makeRecord(logger.name, logging.WARNING, "", 1, message, ("limit", 8), None)
        return bool(logger.filter(record))

    advice = "torch._dynamo hit config.%s (%s)"
    assert is_logged(advice)
    enter_model()
    try:
        assert not is_logged(advice) and is_logged("something else")
    finally:
        leave_model()
    assert is_logged(advice)
