# SPDX-License-Identifier: Apache-2.0
"""The docstrings of the public names: Google style, with every argument and field."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import penstock
from penstock.graph.plan_record import CutTotals, PlannedCall, PlannedEdge, RunningPrice
from penstock.loader.skipped_samples import SkippedSample
from penstock.loader.stats import LoaderReport, LoaderStats
from penstock.loader.step_times import SlowSample, StepTimes, WorkerTimes
from penstock.ranks.steps import EpochEnd
from penstock.worker import shared_list

CONSTRUCTED = (
    *("ChunkSampler", "ChunkedDataset"),
    *("CostBatchSampler", "DataLoader", "MixtureSampler", "Packer", "Pool", "Ranks", "SharedList"),
    "WaitingMeter",
)
RECORDS = (
    CutTotals,
    EpochEnd,
    LoaderReport,
    LoaderStats,
    penstock.ChunkRandomness,
    penstock.PackerStats,
    penstock.Plan,
    PlannedCall,
    PlannedEdge,
    RunningPrice,
    SkippedSample,
    SlowSample,
    StepTimes,
    WorkerTimes,
)
SECTION = re.compile(r"^(\w[\w ]*):$", re.MULTILINE)
# An entry of a section: "    name (type): text".
ENTRY = re.compile(r"^ {4}\*{0,2}(\w+) \(", re.MULTILINE)


def documented(value: Any) -> list[tuple[str, Any]]:
    """The class or function, and the public functions that the class itself defines."""
    found = [(value.__name__, value)]
    if inspect.isclass(value):
        found += [
            (f"{value.__name__}.{name}", member)
            for name, member in vars(value).items()
            if not name.startswith("_") and inspect.isfunction(member)
        ]
    return found


def with_arguments() -> Iterator[tuple[str, Any]]:
    for name in penstock.__all__:
        value = getattr(penstock, name)
        if name in CONSTRUCTED or not inspect.isclass(value):
            yield from documented(value)


def entries(text: str, section: str) -> list[str]:
    """The names that a section describes, in order."""
    before, heading, rest = text.partition(f"\n{section}:\n")
    return ENTRY.findall(re.split(r"\n(?=\S)", rest)[0]) if heading else []


@pytest.mark.parametrize("value", [pytest.param(one, id=name) for name, one in with_arguments()])
def test_every_argument_is_described_in_order(value: Any) -> None:
    arguments = [one for one in inspect.signature(value).parameters if one != "self"]
    assert entries(inspect.getdoc(value) or "", "Args") == arguments


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_field_of_a_record_is_described(record: Any) -> None:
    fields = {field.name for field in dataclasses.fields(record)}
    assert set(entries(inspect.getdoc(record) or "", "Attributes")) == fields


@pytest.mark.parametrize("name", penstock.__all__)
def test_docstring_starts_with_a_sentence(name: str) -> None:
    value = getattr(penstock, name)
    if value.__module__ == "penstock._C":
        return  # described in _C.pyi
    text = inspect.getdoc(value) or ""
    assert re.match(r"[A-Z`][^\n]*(?:\n[^\n]+)*[.;]", text.split("\n\n")[0])
    assert not {"Arguments", "Parameters", "Return", "Raise"} & set(SECTION.findall(text))


def test_example_of_shared_list_runs() -> None:
    result = doctest.testmod(shared_list)
    assert result.attempted == 2 and result.failed == 0
