# SPDX-License-Identifier: Apache-2.0
"""How much time is spent waiting for a loader, in numbers and in the text of a bar."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from terminal_program import TerminalProgram
from torch.utils.data import Dataset

import penstock
from penstock import DataLoader
from penstock.loader.step_times import PARTS, StepTimes
from penstock.observing.waiting_meter import waiting_text

pytestmark = pytest.mark.slow


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


def means(times: StepTimes, prefix: str) -> dict[str, Any]:
    """The display of a meter after these steps."""
    found = {name: getattr(times, name) / times.steps for name in PARTS}
    found |= {"step_s": times.total_s / times.steps, "waiting_share": times.waiting_share}
    return {prefix + name: pytest.approx(value) for name, value in found.items()}


def test_scalars_are_means_since_the_last_call() -> None:
    loader = DataLoader(Rows(), batch_size=4, num_workers=1)
    meter = penstock.WaitingMeter(loader)
    assert meter.scalars() == {}
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    first = loader.stats().ledger
    assert first.steps == 5
    assert meter.scalars() == means(first, "penstock/")
    assert meter.scalars() == {}
    for _ in batches:
        pass
    since = loader.stats().ledger - first
    assert since.steps == 5
    assert meter.scalars("loader.") == means(since, "loader.")


def test_waiting_text_names_the_longest_wait() -> None:
    assert waiting_text(StepTimes(4, 9.0, 0.8, 0.2)) == "waiting 10 % (the dataset)"
    assert waiting_text(StepTimes(4, 9.0, wire_s=1.0)) == "waiting 10 % (the wire)"
    assert waiting_text(StepTimes(4, 9.0)) == "waiting 0 %"


def test_waiting_text_is_kept_until_the_interval_ends() -> None:
    loader = DataLoader(Rows(), batch_size=4)
    meter = penstock.WaitingMeter(loader, every_s=3600)
    assert str(meter) == ""
    batches = iter(loader)
    next(batches)
    words = str(meter)
    assert re.fullmatch(r"waiting \d+ % \((the dataset|collating)\)", words)
    next(batches)
    assert str(meter) == words


def test_other_loaders_are_rejected() -> None:
    theirs = torch.utils.data.DataLoader(Rows())
    for call in (penstock.WaitingMeter, penstock.progress):
        with pytest.raises(TypeError, match=r"a penstock.DataLoader is required"):
            call(theirs)
    with pytest.raises(ValueError, match="every_s must be a number of seconds >= 0, got -1"):
        penstock.WaitingMeter(DataLoader(Rows()), every_s=-1)


PROGRAM = """
    import time
    import torch
    import penstock

    class Sleeping(torch.utils.data.Dataset):
        def __len__(self):
            return 300

        def __getitem__(self, index):
            time.sleep(0.01)
            return torch.zeros(3)

    if __name__ == "__main__":
        loader = penstock.DataLoader(Sleeping(), batch_size=2, num_workers=1)
"""
TQDM = """
        bar = penstock.progress(loader, desc="epoch 1", mininterval=0.05)
        for step, batch in enumerate(bar):
            if step % 10 == 0:
                bar.set_postfix(loss=0.5)
"""
RICH = """
        from rich.progress import Progress, TextColumn
        meter = penstock.WaitingMeter(loader)
        columns = *Progress.get_default_columns(), TextColumn("{task.fields[waiting]}")
        with Progress(*columns) as bar:
            task = bar.add_task("epoch 1", total=len(loader), waiting="")
            for batch in loader:
                bar.update(task, advance=1, waiting=str(meter))
"""


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[list[TerminalProgram]]:
    opened: list[TerminalProgram] = []
    yield opened
    for program in opened:
        program.close()


@pytest.mark.long
@pytest.mark.parametrize(("body", "also"), [(TQDM, "loss=0.5, waiting"), (RICH, "waiting")])
def test_progress_bar_on_terminal_shows_waiting(
    tmp_path: Path, terminals: list[TerminalProgram], body: str, also: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(PROGRAM + body))
    program = TerminalProgram([sys.executable, str(path)], os.environ)
    terminals.append(program)
    words = re.compile(r"epoch 1.*waiting \d+ % \(the dataset\)", re.DOTALL)
    text = program.wait(lambda screen: words.search(screen) is not None)
    assert also in text
    assert program.end() == 0


def test_progress_counts_all_batches_like_tqdm() -> None:
    loader = DataLoader(Rows(), batch_size=4, num_workers=1)
    bar = penstock.progress(loader, disable=True)
    assert len(list(bar)) == 10
    assert len(bar) == 10
