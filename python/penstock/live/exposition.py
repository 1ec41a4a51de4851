# SPDX-License-Identifier: Apache-2.0
"""Metrics as text for Prometheus: its format 0.0.4, and OpenMetrics 1.0. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

PLAIN_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Sample:
    value: float
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter's ``name`` is without the ending _total, which its samples have. An info is a gauge
    of 1 whose name ends in _info in the samples."""

    name: str
    kind: Literal["counter", "gauge", "info"]
    help: str
    samples: Sequence[Sample]


def exposition(metrics: Sequence[Metric], *, is_open: bool) -> str:
    """``is_open`` is OpenMetrics."""
    lines = [line for metric in metrics for line in _lines(metric, is_open)]
    if is_open:
        lines.append("# EOF")
    return "".join(f"{line}\n" for line in lines)


def wants_open_metrics(accept: str) -> bool:
    """Whether a request's Accept prefers OpenMetrics to plain text."""
    quality = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for entry in accept.split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        if kind not in quality:
            continue
        given = [p[2:] for p in parameters if p.startswith("q=")]
        try:
            value = float(given[0]) if given else 1.0
        except ValueError:
            value = 0.0
        quality[kind] = max(quality[kind], value)
    return quality["application/openmetrics-text"] > quality["text/plain"]


def _lines(metric: Metric, is_open: bool) -> Iterator[str]:
    ending = {"counter": "_total", "gauge": "", "info": "_info"}[metric.kind]
    sample_name = f"{metric.name}{ending}"
    name = metric.name if is_open else sample_name
    kind = "gauge" if metric.kind == "info" and not is_open else metric.kind
    yield f"# HELP {name} {_escaped_help(metric.help, is_open)}"
    yield f"# TYPE {name} {kind}"
    unit = next((u for u in ("seconds", "bytes") if metric.name.endswith(f"_{u}")), None)
    if is_open and unit is not None and metric.kind != "info":
        yield f"# UNIT {name} {unit}"
    for sample in metric.samples:
        pairs = ",".join(f'{key}="{_escaped(value)}"' for key, value in sample.labels.items())
        yield f"{sample_name}{'{' + pairs + '}' if pairs else ''} {_number(sample.value)}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _escaped_help(text: str, is_open: bool) -> str:
    return _escaped(text) if is_open else text.replace("\\", r"\\").replace("\n", r"\n")
