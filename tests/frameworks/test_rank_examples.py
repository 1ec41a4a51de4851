# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/ranks, each on 2 ranks: all give bit-for-bit the same losses, even when
they are stopped in mid-epoch and resume from their checkpoints. The stages of a pipeline have the
losses of one process."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "ranks"
SECONDS_MAX = 110
STEPS, STOP_AFTER = 12, 4  # an epoch has 6
_LOOPBACK = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
_ACCELERATE = ["--multi_gpu", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
_ADDRESS = ["--main_process_ip=127.0.0.1", "--main_process_port=0"]

PYTHON = [sys.executable]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", *_LOOPBACK, "--nproc-per-node=2"]
ACCELERATE = [*PYTHON, "-m", "accelerate.commands.launch", *_ACCELERATE, *_ADDRESS]
# The launcher, and the option that names the saved file.
WAYS: dict[str, tuple[list[str], str]] = {
    "ddp": (TORCHRUN, "--state"),
    "fsdp2": (TORCHRUN, "--checkpoint"),
    "lightning_ddp": (PYTHON, "--checkpoints"),
    "accelerate_launch": ([*ACCELERATE, "--num_processes=2"], "--checkpoint"),
    "hf_trainer": (TORCHRUN, "--output"),
    "pipeline_stages": (TORCHRUN, "--state"),
}
DATA_PARALLEL = [name for name in WAYS if name != "pipeline_stages"]


def run(name: str, *arguments: str) -> dict[int, list[float]]:
    """The losses of each rank."""
    process = subprocess.Popen(
        [*WAYS[name][0], str(EXAMPLES / f"{name}.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONWARNINGS": "ignore",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
    )
    try:
        out, err = process.communicate(timeout=SECONDS_MAX)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)  # a launcher ends its ranks
        process.wait()
    assert process.returncode == 0, err
    found = re.findall(r"^rank (\d): losses (\[.*\])$", out, re.MULTILINE)
    return {int(rank): ast.literal_eval(losses) for rank, losses in found}


@pytest.fixture(scope="module")
def expected() -> dict[int, list[float]]:
    """The losses of the uninterrupted DDP example."""
    losses = run("ddp")
    assert {rank: len(of_rank) for rank, of_rank in losses.items()} == {0: STEPS, 1: STEPS}
    assert losses[0] != losses[1]
    return losses


@pytest.mark.long("accelerate_launch", "hf_trainer", "lightning_ddp", "fsdp2")
@pytest.mark.parametrize("name", [name for name in DATA_PARALLEL if name != "ddp"])
def test_example_has_the_losses_of_ddp(
    name: str, expected: dict[int, list[float]], tmp_path: Path
) -> None:
    given = ["--output", str(tmp_path / "saved")] if name == "hf_trainer" else []
    assert run(name, *given) == expected


@pytest.mark.long
@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_example_resumes_within_an_epoch(
    name: str, expected: dict[int, list[float]], tmp_path: Path
) -> None:
    saved = [WAYS[name][1], str(tmp_path / "saved")]
    first = run(name, *saved, "--stop-after", str(STOP_AFTER))
    assert first == {rank: losses[:STOP_AFTER] for rank, losses in expected.items()}
    rest = run(name, *saved)
    assert rest == {rank: losses[STOP_AFTER:] for rank, losses in expected.items()}


ONE_PROCESS = """
from task import EPOCHS, loss_of, make_loader, make_model, make_optimizer, report
loader, model = make_loader(), make_model()
optimizer, losses = make_optimizer(model), []
for epoch in range(EPOCHS):
    for batch in loader:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(0, losses)
"""


@pytest.mark.long
def test_pipeline_stages_have_the_losses_of_one_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PYTHON, "-c", ONE_PROCESS],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES)},
    )
    assert done.returncode == 0, done.stderr
    losses = ast.literal_eval(done.stdout.removeprefix("rank 0: losses "))
    assert len(losses) == STEPS
    assert run("pipeline_stages") == {0: [], 1: losses}
    saved = ["--state", str(tmp_path / "saved")]
    assert run("pipeline_stages", *saved, "--stop-after", str(STOP_AFTER))[1] == losses[:STOP_AFTER]
    assert run("pipeline_stages", *saved)[1] == losses[STOP_AFTER:]
