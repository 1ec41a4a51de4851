# SPDX-License-Identifier: Apache-2.0
"""The page, from the records alone: text and figures come from the same runs."""

from __future__ import annotations

import statistics
import textwrap
from typing import Any

import promises
import rates
from systems import SYSTEMS
from table import aligned

WIDTH = 120
QUIET_FOREIGN_CORES = 0.2
NOT_RUN = "not run"
WORKLOADS = {
    "rows": ("small rows", "a row of 100 floats and a label; 256 a batch, 50,000 an epoch"),
    "photographs": (
        "photographs",
        "JPEG files of 500 x 375: decode, random resized crop to 224, flip, to float; 32 a batch",
    ),
    "texts": (
        "texts",
        "sentences of 4 to 256 words to token ids, padded to the longest of the batch; 64 a batch",
    ),
    "heavy": (
        "heavy tail",
        "1,000 floats; 5 % of the samples sleep for 50 ms, as for a slow store; 32 a batch",
    ),
}

Records = dict[str, Any]


def page_of(records: Records) -> str:
    """Return the page in Markdown."""
    parts = [
        "# Comparison with other loaders",
        _prose(
            "Each cell below is a check or a measurement that ran on the named version of the "
            "system, as its own documentation recommends to use it. `make comparison` runs all of "
            "them, each system in a separate virtual environment, and writes this page from the "
            "records, [comparison.json](comparison.json). Cells of systems that lose are written "
            'the same way as cells of systems that win. "not run" gives its reason.'
        ),
        "## Systems",
        _systems(records),
        "## Promises",
        *_promises(records),
        "## Rates",
        *_rates(records),
        "## Notes",
        _notes(records),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _systems(records: Records) -> str:
    rows = [["system", "version", "as it was used"]]
    for name, system in SYSTEMS.items():
        described = records.get("systems", {}).get(name, {"not_run": "not in any run"})
        versions = ", ".join(
            f"{package} {version}" for package, version in described.get("versions", {}).items()
        )
        rows.append(
            [
                system.title,
                versions or f"{NOT_RUN}: {cell(described['not_run'])}",
                system.configuration,
            ]
        )
    return aligned(rows)


def _promises(records: Records) -> list[str]:
    found = records.get("promises", {})
    if not found:
        return [f"{NOT_RUN}."]
    rows = [["promise", *(system.title for system in SYSTEMS.values())]]
    for name, (title, _) in promises.PROMISES.items():
        values = [_value(records, system, name) for system in SYSTEMS]
        rows.append([title, *(value.partition(":")[0] for value in values)])
    runs = sorted({(run["date"], run["machine"]) for run in found.values()})
    where = "; ".join(f"{date}, {machine}" for date, machine in runs)
    parts = [
        _prose(f'{where}: `make comparison ARGS="--only promises"`.'),
        aligned(rows),
        _prose(
            "The sections below describe each check, and every answer other than yes. All use two "
            f"workers, {promises.SAMPLE_COUNT:,} shuffled samples of 2 ms in batches of 8, unless "
            "it says otherwise. A check that does not end within "
            f"{promises.LIMIT_S:.0f} s is stopped, and that is its answer. Where a "
            "system has no interface for a promise, the answer names the absent part."
        ),
    ]
    for name, (title, check) in promises.PROMISES.items():
        reasons: dict[str, list[str]] = {}
        for system in SYSTEMS:
            value = _value(records, system, name)
            if value != "yes":
                reasons.setdefault(value, []).append(SYSTEMS[system].title)
        lines = [f"### {title}", _prose(" ".join((check.__doc__ or "").split()))]
        bullets = [
            _bullet(f"{', '.join(names)}: {cell(why.removeprefix('no: '))}")
            for why, names in reasons.items()
        ]
        parts += [*lines, "\n".join(bullets)]
    return parts


def _value(records: Records, system: str, promise: str) -> str:
    not_run = records.get("systems", {}).get(system, {}).get("not_run")
    values = records.get("promises", {}).get(system, {}).get("values", {})
    value: str = values.get(promise, f"{NOT_RUN}: {not_run or 'not in any run'}")
    return value


def _rates(records: Records) -> list[str]:
    run = records.get("rates")
    if run is None:
        return [
            _prose(
                f"{NOT_RUN}: the rates are measured on a quiet machine, by "
                '`make comparison ARGS="--only rates"`.'
            )
        ]
    found = {(record["system"], record["workload"]): record for record in run["values"]}
    ratios = [["system", *(title for title, _ in WORKLOADS.values())]]
    absolute = [ratios[0]]
    for system, described in SYSTEMS.items():
        cells = [found.get((system, workload)) for workload in rates.WORKLOADS]
        not_run = records.get("systems", {}).get(system, {}).get("not_run")
        if not_run:
            cells = [{"why_not": not_run}] * len(cells)
        ratios.append([described.title, *(_spread(record, "ratios", "{:.2f}") for record in cells)])
        absolute.append(
            [described.title, *(_spread(record, "rates", "{:,.0f}") for record in cells)]
        )
    reasons = [
        _bullet(
            f"{SYSTEMS[record['system']].title}, {WORKLOADS[record['workload']][0]}: "
            f"{cell(record['why_not'])}"
        )
        for record in run["values"]
        if "why_not" in record
    ]
    busy = ""
    if run["foreign_cores"] > QUIET_FOREIGN_CORES:
        busy = (
            f" Before the run, other programs used {run['foreign_cores']:.1f} cores: these figures "
            "were made on a busy machine and are not to be quoted."
        )
    return [
        _prose(f"{run['date']}, {run['machine']}: `{run['command']}`.{busy}"),
        _prose(
            f"Samples per second of an empty loop with two workers. Up to {run['rounds']} rounds, "
            f"in which all systems take turns: each has {run['warmup']} s and at least 8 batches "
            f"of warm-up, then {run['seconds']} s. First the ratio to torch's loader in the same "
            "round, median (lowest to highest); above 1 is faster than torch."
        ),
        aligned(ratios),
        "Samples per second:",
        aligned(absolute),
        "\n".join(
            _bullet(f"{title[0].upper()}{title[1:]}: {description}.")
            for title, description in WORKLOADS.values()
        ),
        "\n".join(reasons),
    ]


def _spread(record: dict[str, Any] | None, name: str, form: str) -> str:
    if record is None or "why_not" in record:
        return NOT_RUN
    values = record[name]
    if not values:
        return NOT_RUN
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{form} ({form} to {form})".format(middle, low, high)


def _notes(records: Records) -> str:
    notes = [
        "A check shows the behaviour of one version on one machine. It can refute a promise, not "
        "prove it.",
        "torch's loader, StatefulDataLoader, LitData, MosaicML Streaming and penstock use worker "
        "processes and the same dataset code. Grain applies the same code in its own pipeline, Ray "
        "Data in its tasks, SPDL in processes for the promises and in threads for the rates.",
        "tf.data runs its own operations in threads of the trainer, and so has other pixels; the "
        "heavy tail calls Python from them, which the servers of its service cannot run. Its rows "
        "and texts lie in tensors of its graph.",
        "Images are decoded natively by penstock, by functions of tf.data and of Ray Data, and by "
        "Pillow in user code elsewhere. SPDL has a decoder, which was not run: it needs FFmpeg, "
        "which is not part of its package and was not installed.",
        "Ray Data begins each window with a new iterator, because only the memory of its "
        "object store limits how far it works ahead. The other loaders go on from window to "
        "window, over the ends of epochs.",
    ]
    conversions = [
        f"{SYSTEMS[system].title} {seconds:.0f} s ({WORKLOADS[kind][0]})"
        for system, kinds in sorted(records.get("conversions", {}).items())
        for kind, seconds in sorted(kinds.items())
        if kind in WORKLOADS and seconds is not None
    ]
    if conversions:
        notes.append(
            "Converting the data to the formats of some systems is not part of the rates. It took "
            + ", ".join(conversions)
            + ". Grain reads the dataset itself."
        )
    return "\n".join(map(_bullet, notes))


def cell(text: str) -> str:
    """Text from a system, which must not be taken for Markdown."""
    text = text.replace("`", "'")
    for mark in "\\*_[]<>|":
        text = text.replace(mark, "\\" + mark)
    return text


def _prose(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _bullet(text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
