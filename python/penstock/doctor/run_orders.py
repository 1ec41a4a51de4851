# SPDX-License-Identifier: Apache-2.0
"""What one run of the program is asked to do, and what it tells: JSON that crosses to its process
and back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.tuning.loader_settings import LoaderSettings
from penstock.tuning.observation import MadeBatch, Observation

ORDERS_VARIABLE = "PENSTOCK_DOCTOR"


@dataclass(frozen=True, slots=True)
class RunOrders:
    """``loader`` is the number of the loader that the ``overrides`` are for, in the order in which
    the program makes its loaders; None: whichever it will be, and there are none."""

    result_fd: int
    folder: str  # of the run's own temporary files
    steps: int
    seconds: float  # the most that are measured
    loader: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    offload: bool = False
    asks_for_plan: bool = False  # what of the model could move, in place of measuring

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_environment() -> RunOrders:
        """Takes them out of the environment, so that programs that this one starts have none."""
        return RunOrders(**json.loads(os.environ.pop(ORDERS_VARIABLE)))


@dataclass(frozen=True, slots=True)
class LoaderSeen:
    """One loader of the program: its number, its dataset's name and what was seen of it."""

    number: int
    dataset: str
    observation: Observation


@dataclass(frozen=True, slots=True)
class MovableCall:
    """One call of the model that workers could make: ``seconds`` a batch where it runs now, on
    ``device`` by that device's events, or on the CPU."""

    operator: str
    seconds: float
    device: str | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """``error`` is the exception that ended the program, by type and text. ``is_stopped`` is False
    for a program that came to its end by itself."""

    loaders: tuple[LoaderSeen, ...] = ()
    error_type: str = ""
    error: str = ""
    is_stopped: bool = False
    has_asked_input: bool = False
    movable_s: float | None = None
    movable_calls: tuple[MovableCall, ...] = ()  # those that take longest
    plan_refusal: str = ""

    @property
    def busiest(self) -> LoaderSeen | None:
        """The loader that most of the time went to."""

        def seconds(one: LoaderSeen) -> float:
            return one.observation.steps * one.observation.whole_step_s

        return max(self.loaders, key=seconds, default=None)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> RunResult:
        record = json.loads(text)
        record["loaders"] = tuple(
            LoaderSeen(one["number"], one["dataset"], _observation(one["observation"]))
            for one in record["loaders"]
        )
        record["movable_calls"] = tuple(MovableCall(**one) for one in record["movable_calls"])
        return RunResult(**record)


def _observation(record: dict[str, Any]) -> Observation:
    record["settings"] = LoaderSettings(**record["settings"])
    record["batches"] = tuple(MadeBatch(**one) for one in record["batches"])
    record["slow_samples"] = tuple((seconds, name) for seconds, name in record["slow_samples"])
    return Observation(**record)
