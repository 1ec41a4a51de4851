# SPDX-License-Identifier: Apache-2.0
"""What the doctor found, for people and as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from penstock.doctor.examination import Examination, Trial
from penstock.loader.step_times import PARTS
from penstock.tuning.advice import note_on
from penstock.tuning.observation import Observation
from penstock.tuning.spoken_numbers import spoken_bytes, spoken_share, spoken_time

_COLUMNS = 96


def diagnosis_text(found: Examination) -> str:
    """What limits the program, and the rates of the stages."""
    base = found.base
    settings = base.settings
    lines = [
        f"Loader {found.loader} (over {found.dataset}; num_workers={settings.num_workers}, "
        f"fetch_threads={settings.fetch_threads}, prefetch_factor={settings.prefetch_factor}, "
        f"persistent_workers={settings.persistent_workers}), {base.steps} steps seen.",
        "",
        *_wrapped(str(found.advice.diagnosis)),
        "",
        *table(["stage", "a batch takes", "at most", "at work"], stage_rows(base)),
    ]
    waiting = sorted(base.waiting.items(), key=lambda one: -one[1])
    told = [
        f"{PARTS[name]} {spoken_time(seconds)}"
        for name, seconds in waiting
        if seconds > 0.01 * base.step_s
    ]
    lines += ["", f"Of a step of {spoken_time(base.whole_step_s)} the program waits "
              f"{spoken_share(base.waiting_s / max(base.step_s, 1e-12))}"
              + (f": for {', '.join(told)}." if told else ".")]  # fmt: skip
    if found.movable_calls:
        rows = [
            [call.operator, call.device or "CPU", spoken_time(call.seconds)]
            for call in found.movable_calls
        ]
        lines += ["", *table(["call that workers could make", "runs on", "a batch takes"], rows)]
    return "\n".join(lines)


def changes_text(found: Examination) -> str:
    """The trials, the advice as code, and what else could be done."""
    base = found.base
    lines = []
    if found.trials:
        rows = [["as it is", "", spoken_time(base.whole_step_s), _rate(base.whole_step_s)]]
        rows += [_trial_row(found, trial) for trial in found.trials]
        lines += table(["change", "a step, predicted", "measured", "steps a second"], rows)
        failures = [trial for trial in found.trials if trial.failure]
        lines += [
            f"{_words(found, trial)} failed: {trial.failure.splitlines()[0]}" for trial in failures
        ]
        lines.append("")
    if found.cannot_repeat:
        lines += [*_wrapped(found.cannot_repeat), ""]
    lines += _advice_lines(found)
    return "\n".join(lines)


def stage_rows(seen: Observation) -> list[list[str]]:
    """Each stage: seconds for a batch, the rate that it would allow by itself, and how long of the
    time it is at work."""
    at_once = max(1, seen.settings.num_workers) if not seen.has_pool else max(1, seen.pool_workers)
    who = f"{at_once} at once" if at_once > 1 else "1 at once"
    transform_s = seen.transform_s or 0.0
    stages = [
        ("dataset", seen.dataset_s - transform_s, at_once),
        ("transforms", transform_s, at_once),
        ("collate", seen.collate_s, at_once),
        ("prefix", seen.prefix_s, at_once),
        (f"workers ({who})", seen.making_s, at_once),
        ("wire", seen.wire_s, at_once),
        ("loader", seen.loader_s, 1),
        ("trainer", seen.compute_s, 1),
    ]
    rows = []
    for name, seconds, count in stages:
        if seconds <= 0:
            continue
        busy = min(1.0, seconds / count / max(seen.whole_step_s, 1e-12))
        rows.append(
            [name, spoken_time(seconds), f"{count / seconds:.3g} batches/s", spoken_share(busy)]
        )
    return rows


def as_record(found: Examination) -> dict[str, Any]:
    """For ``--json``; times are seconds."""
    base = found.base
    observed = asdict(base)
    del observed["batches"]
    return {
        "limit": found.advice.diagnosis.limit.value,
        "reason": found.advice.diagnosis.reason,
        "loader": found.loader,
        "dataset": found.dataset,
        "observed": observed,
        "movable_calls": [asdict(call) for call in found.movable_calls],
        "step_s": base.whole_step_s,
        "changes": [
            {
                "change": change.text,
                "predicted_step_s": change.predicted_step_s,
                "note": change.note,
            }
            for change in found.advice.changes
        ],
        "trials": [
            {
                "change": trial.settings.spoken_changes_from(base.settings),
                "settings": asdict(trial.settings),
                "predicted_step_s": trial.predicted_step_s,
                "measured_step_s": trial.measured_step_s,
                "failure": trial.failure or None,
            }
            for trial in found.trials
        ],
        "best": asdict(found.best),
        "best_step_s": found.best_step_s,
        "advice": code(found),
        "cannot_repeat": found.cannot_repeat or None,
    }


def code(found: Examination) -> str | None:
    """What to write in the program for the fastest settings; None where they are those it has."""
    changes = found.best.changes_from(found.base.settings)
    lines = []
    if changes:
        words = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        lines.append(f"loader = penstock.DataLoader(..., {words})")
    if found.best.offload and not found.base.settings.offload:
        lines.append("model = penstock.offload(model, loader)")
    return "\n".join(lines) or None


def _advice_lines(found: Examination) -> list[str]:
    base, lines = found.base, []
    advice = code(found)
    if advice is not None:
        gain = base.whole_step_s / max(found.best_step_s, 1e-12)
        lines += [
            f"Advice: a step takes {spoken_time(found.best_step_s)} in place of "
            f"{spoken_time(base.whole_step_s)} ({gain:.2g} times as fast) with",
            "",
            *(f"    {line}" for line in advice.splitlines()),
        ]
        if note := note_on(base, found.best):
            lines += ["", *_wrapped(note)]
    elif found.trials:
        lines.append("Advice: leave the loader as it is. No change that was tried is faster.")
    elif not any(change.settings for change in found.advice.changes):
        lines.append("No option of the loader promises to make it faster.")
    tried = {trial.settings for trial in found.trials}
    named = [
        one for one in found.advice.changes if one.settings is None or one.settings not in tried
    ]
    if named:
        lines += ["", "Not tried here:" if found.trials else "What to do:"]
        for change in named:
            promise = (
                f" (a step of {spoken_time(change.predicted_step_s)})"
                if change.predicted_step_s is not None
                else ""
            )
            note = f" {change.note}" if change.note else ""
            lines += _wrapped(f"  - {change.text}{promise}.{note}", "    ")
    if base.memory_free_bytes is not None and base.batch_bytes > 0:
        ahead = found.best.ahead
        lines += ["", f"Batches of {spoken_bytes(base.batch_bytes)}, {ahead} ahead; "
                  f"{spoken_bytes(base.memory_free_bytes)} of memory are free."]  # fmt: skip
    return lines


def _trial_row(found: Examination, trial: Trial) -> list[str]:
    measured = trial.measured_step_s
    return [
        _words(found, trial),
        spoken_time(trial.predicted_step_s),
        "failed" if measured is None else spoken_time(measured),
        "" if measured is None else _rate(measured),
    ]


def _words(found: Examination, trial: Trial) -> str:
    return trial.settings.spoken_changes_from(found.base.settings)


def _rate(seconds: float) -> str:
    return f"{1 / max(seconds, 1e-12):.3g}"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, _COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Columns of text, the first to the left and the others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in [head, *rows]
    ]
