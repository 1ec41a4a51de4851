# SPDX-License-Identifier: Apache-2.0
"""Prefixes that AOTInductor compiles during the training, which stays the same."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import process_traces
import pytest
import torch
from cut_models import CASES
from offload_training import bits, fresh
from torch import nn

from penstock import DataLoader
from penstock.cut.offloading import detach, offload

pytestmark = [pytest.mark.usefixtures("on_one_thread"), pytest.mark.slow]

LOSS = CASES[5].loss
COMPILING_S_MAX = 240.0


class Images(torch.utils.data.Dataset[Any]):
    """Batches of one size, and a smaller last one, of floats: torch 2.15 compiles conversions from
    integers to code slower than the executor."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        pixels = [
            torch.randint(256, (count, 3, 96, 96), generator=draw).float()
            for count in (24, 24, 24, 24, 24, 7)
        ]
        self.batches = [(images, torch.zeros(len(images)).long()) for images in pixels]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


class Normalising(nn.Module):
    """Element by element, which a compiler handles quickly."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1))
        self.net = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = ((x / 255 - self.mean).abs() + 0.5).clamp(0.6, 1.2) * 2 - 1
        return self.net(x.permute(0, 2, 3, 1)).mean((1, 2))


class Summing(Normalising):
    """Sums may differ."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x / 255
        return self.net((x / x.flatten(1).sum(1).sqrt()[:, None, None, None]).sum((2, 3)).exp())


def loaders() -> tuple[Any, DataLoader[Any]]:
    options: dict[str, Any] = {"batch_size": None, "num_workers": 2, "persistent_workers": True}
    return torch.utils.data.DataLoader(Images(), **options), DataLoader(Images(), **options)


def run_until_compiled(
    make_model: Any, caplog: pytest.LogCaptureFixture, more_epochs: int
) -> DataLoader[Any]:
    """Trains next to torch's loader until the compiled prefix is there, and some epochs more."""
    caplog.set_level(logging.INFO, "penstock")
    theirs, ours = loaders()
    reference, plain = fresh(make_model), fresh(make_model)
    model = offload(plain, ours, cut="maximal", verify_every=50, compile_prefix=True)
    parameters = [*reference.parameters()], [*plain.parameters()]
    optimizers = [torch.optim.SGD(each, lr=0.05, momentum=0.9) for each in parameters]
    until = time.monotonic() + COMPILING_S_MAX
    while more_epochs > 0:
        for their_batch, our_batch in zip(theirs, ours, strict=True):
            losses = LOSS(reference, their_batch), LOSS(model, our_batch)
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            assert bits(losses[0]) == bits(losses[1])
        if any("a prefix " in record.getMessage() for record in caplog.records):
            more_epochs -= 1
        else:
            time.sleep(0.5)  # for the compiler, which runs at a low priority
        assert time.monotonic() < until
    for their, our in zip(*parameters, strict=True):
        assert bits(their) == bits(our)
    detach(model)
    return ours


@pytest.mark.long
def test_workers_use_the_compiled_prefix_and_training_matches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = run_until_compiled(Normalising, caplog, 20)
    stats = loader.stats()
    assert 40 < stats.compiled_batches < stats.boundary_batches
    assert "a prefix was compiled" in caplog.text


@pytest.mark.long
def test_compiled_prefix_with_other_bits_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    loader = run_until_compiled(Summing, caplog, 10)
    assert "a prefix was compiled" in caplog.text
    assert loader.stats().compiled_batches == 0
    assert loader.stats().boundary_batches > 40


@pytest.mark.long
def test_training_is_unchanged_without_a_compiler(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    loader = run_until_compiled(Normalising, caplog, 1)
    assert "a prefix is not compiled: " in caplog.text
    assert loader.stats().compiled_batches == 0


@pytest.mark.long
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_compiler_process_ends_with_its_program(tmp_path: Path, end: int) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            sys.path[:0] = {sys.path!r}
            import torch
            import test_compiled_prefix as t
            from penstock import DataLoader, offload

            torch.set_num_threads(1)
            loader = DataLoader(t.Images(), batch_size=None, num_workers=1)
            model = offload(t.Normalising(), loader, cut="maximal", compile_prefix=True)
            while True:
                for images, _ in loader:
                    model(images)
                    time.sleep(0.01)
                context = model._compiled_call_impl.context
                if context.prefixes.compiler._process is not None:
                    print(context.prefixes.compiler._process._process.pid, flush=True)
                    time.sleep(60)
            """
        )
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        compiler = int(process.stdout.readline())
        until = time.monotonic() + 60
        while not [*tmp_path.glob("penstock-compiler-*")] and time.monotonic() < until:
            time.sleep(0.1)
        process.send_signal(end)
        process.wait(20)
    while (is_there := process_traces.is_running(compiler)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_there
    assert not [*tmp_path.glob("penstock-compiler-*")]


class Resizing(Normalising):
    """AOTInductor calls this operator by its name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.interpolate(x.float(), size=(9, 9), mode="bilinear", antialias=True)
        return self.net(x.permute(0, 2, 3, 1)).mean((1, 2))


@pytest.mark.long
def test_uncompilable_prefix_is_left_to_the_executor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = run_until_compiled(Resizing, caplog, 1)
    assert "not compiled: " in caplog.text
    assert "AOTInductor has no direct call for one of its operators" in caplog.text
    assert loader.stats().compiled_batches == 0
