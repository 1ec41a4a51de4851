# SPDX-License-Identifier: Apache-2.0
"""The search of `penstock doctor`: an unchanged run of the program, its bottleneck, and trials of
the most promising settings. Then the results, as text and as JSON.

Pure except for ``run``, which is passed in. Each trial is one run with other settings. After each
trial, the observation of the fastest settings so far determines the next one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.doctor.program_runs import ColumnUse, MovableCall, NotExaminable, RunResult
from penstock.errors import PenstockError
from penstock.loader.step_times import PARTS
from penstock.tuning.advice import (
    SAME_SHARE,
    Advice,
    advise,
    best_first,
    possible_settings,
    side_effects_of,
)
from penstock.tuning.limiting import WAITING_SHARE_MIN, Limit
from penstock.tuning.observation import (
    LoaderSettings,
    Observation,
    format_bytes,
    format_share,
    format_time,
)

# Settings whose predicted time is at most this much above the fastest measured one may still be
# faster: the model is incomplete.
_CANDIDATE_MARGIN = 0.10
# If no setting promises a gain of at least this share, the program is left alone.
_GAIN_MIN = 0.03
# Two measurements of the same settings may differ by this share.
_NOISE_SHARE = 0.02

SCHEMA = "penstock.doctor/1"

Run = Callable[[LoaderSettings, LoaderSettings, int], RunResult]
Log = Callable[[str], None]
_COLUMNS = 96


@dataclass(frozen=True, slots=True)
class Trial:
    settings: LoaderSettings
    predicted_step_s: float
    measured_step_s: float | None  # None: the run failed, for `failure`
    failure: str = ""


@dataclass(slots=True)
class Examination:
    """The results; ``cannot_repeat`` is the reason why the program could not be run again."""

    loader: int
    dataset: str
    base: Observation
    advice: Advice
    trials: list[Trial] = field(default_factory=list)
    best: LoaderSettings = field(default_factory=LoaderSettings)
    best_step_s: float = 0.0
    cannot_repeat: str = ""
    movable_calls: tuple[MovableCall, ...] = ()
    columns: ColumnUse | None = None


def examine_first_run(result: RunResult) -> Examination:
    """Examine the first run. Raises NotExaminable if it showed no loader in use."""
    busiest = result.busiest
    if busiest is None:
        raise NotExaminable(failure_reason(result))
    seen = replace(busiest.observation, movable_s=result.movable_s)
    return Examination(
        busiest.number,
        busiest.dataset,
        seen,
        advise(seen),
        best=seen.settings,
        best_step_s=seen.whole_step_s,
        columns=busiest.columns,
    )


def note_movable(found: Examination, plan: RunResult | None, allow_reordering: bool) -> None:
    """Add the part of the program's work that could move to the workers; None if it is unknown."""
    found.base = replace(found.base, movable_s=None if plan is None else plan.movable_s)
    found.movable_calls = () if plan is None else plan.movable_calls
    found.advice = advise(found.base, allow_reordering)


def is_worth_a_plan(found: Examination) -> bool:
    """Return whether the model's movable work matters: the program's work is the bottleneck, and it
    has workers."""
    base = found.base
    is_busy = found.advice.diagnosis.limit is Limit.TRAINER
    return is_busy and base.settings.num_workers > 0 and not base.is_offloaded


def try_changes(
    found: Examination, run: Run, trials_max: int, allow_reordering: bool, log: Log
) -> None:
    """Try the most promising settings, at most ``trials_max``, and add the trials to ``found``."""
    seen = {found.base.settings: found.base}
    measured = {found.base.settings: found.base.whole_step_s}
    newest = found.base
    while len(found.trials) < trials_max:
        choice = _next_settings(found, newest, seen, measured, allow_reordering)
        if choice is None:
            return
        predicted_s, settings = choice
        number = len(found.trials) + 1
        words = settings.format_changes_from(found.base.settings)
        log(f"trial {number} of at most {trials_max}: {words}")
        trial, result = _tried(found, run, settings, predicted_s)
        if trial.measured_step_s is None and number == 1 and _fails_unchanged(found, run, log):
            found.cannot_repeat = cannot_repeat(trial.failure, result)
            return
        found.trials.append(trial)
        measured[settings] = trial.measured_step_s or float("inf")
        if trial.measured_step_s is None or result is None:
            continue
        observation = _observation_of(result, found)
        if observation is not None:
            seen[settings] = replace(observation, settings=settings, movable_s=found.base.movable_s)
            if trial.measured_step_s < found.best_step_s * (1 - _NOISE_SHARE):
                newest = seen[settings]
        if trial.measured_step_s < found.best_step_s * (1 - _NOISE_SHARE):
            found.best, found.best_step_s = settings, trial.measured_step_s


def _next_settings(
    found: Examination,
    newest: Observation,
    seen: dict[LoaderSettings, Observation],
    measured: dict[LoaderSettings, float],
    allow_reordering: bool,
) -> tuple[float, LoaderSettings] | None:
    """Return the most promising untried settings by the fastest observation; None if no settings
    are worth a run."""
    possible = [one for one in possible_settings(newest, allow_reordering) if one not in measured]
    rated = best_first(newest, possible)
    if not rated:
        return None
    if not found.trials:
        if rated[0][0] <= found.base.whole_step_s * (1 - _GAIN_MIN):
            return rated[0]
        if found.base.waiting_s < WAITING_SHARE_MIN * found.base.step_s:
            return None
        return _more_of_all(rated, found.base)
    failed = [one for one, seconds in measured.items() if seconds == float("inf")]
    near = [
        (predicted_s, one)
        for predicted_s, one in rated
        if predicted_s <= found.best_step_s * (1 + _CANDIDATE_MARGIN)
        and not any(_fails_alike(one, other, found.base.settings) for other in failed)
    ]
    better = [one for one in near if one[0] <= found.best_step_s * (1 - SAME_SHARE)]
    if better:
        return better[0]
    neighbours = [
        one
        for one in near
        if _distance(one[1], found.best) == 1
        and one[1].prefetch_factor >= found.best.prefetch_factor
    ]
    return min(neighbours, key=lambda one: _kind(one[1], found.best), default=None)


def _more_of_all(
    rated: list[tuple[float, LoaderSettings]], base: Observation
) -> tuple[float, LoaderSettings] | None:
    """Return settings for a program that waits although the model promises no gain: batches may be
    made faster than they are transferred. Doubles each resource that is available, and keeps the
    other settings."""
    now = base.settings
    workers = max(now.num_workers, min(2 * now.num_workers, base.cpus), 1)
    wanted = replace(now, num_workers=workers, prefetch_factor=max(2, 2 * now.prefetch_factor))
    for settings in (wanted, replace(wanted, num_workers=now.num_workers)):
        found = next((one for one in rated if one[1] == settings), None)
        if found is not None:
            return found
    return None


def _kind(one: LoaderSettings, best: LoaderSettings) -> int:
    """Rank a neighbour of the fastest settings: lowest is the kind that the model knows least
    about."""
    if one.prefetch_factor != best.prefetch_factor:
        return 0
    if one.num_workers != best.num_workers:
        return 1 if one.num_workers > best.num_workers else 2
    return 3


def _fails_alike(one: LoaderSettings, other: LoaderSettings, base: LoaderSettings) -> bool:
    """Return whether ``one`` has the change that probably made ``other`` fail."""
    for name in ("fetch_threads", "offload"):
        if getattr(other, name) != getattr(base, name):
            return bool(getattr(one, name) != getattr(base, name))
    return one == other


def _distance(one: LoaderSettings, other: LoaderSettings) -> int:
    """Return the number of differing settings, each by at most its next step; otherwise a large
    number."""
    steps = 0
    if one.num_workers != other.num_workers:
        steps += 1 if abs(one.num_workers - other.num_workers) == 1 else 9
    for name, factor in (("prefetch_factor", 2), ("fetch_threads", 4)):
        first, second = sorted((getattr(one, name), getattr(other, name)))
        if first != second:
            steps += 1 if second <= factor * first else 9
    for name in ("persistent_workers", "in_order", "seeding", "offload", "pin_memory"):
        steps += getattr(one, name) != getattr(other, name)
    return steps


def _tried(
    found: Examination, run: Run, settings: LoaderSettings, predicted_s: float
) -> tuple[Trial, RunResult | None]:
    try:
        result = run(settings, found.base.settings, found.loader)
    except PenstockError as error:
        return Trial(settings, predicted_s, None, str(error)), None
    if result.error:
        return Trial(settings, predicted_s, None, f"{result.error_type}: {result.error}"), result
    observation = _observation_of(result, found)
    if observation is None:
        return Trial(settings, predicted_s, None, failure_reason(result)), result
    return Trial(settings, predicted_s, observation.whole_step_s), result


def _observation_of(result: RunResult, found: Examination) -> Observation | None:
    for one in result.loaders:
        if one.number == found.loader:
            return one.observation
    return None


def _fails_unchanged(found: Examination, run: Run, log: Log) -> bool:
    log("the trial failed; running the program unchanged once more")
    trial, _ = _tried(found, run, found.base.settings, found.base.whole_step_s)
    return trial.measured_step_s is None


def failure_reason(result: RunResult) -> str:
    if result.has_asked_input and (result.error or not result.loaders):
        return (
            "the program reads from standard input, which is empty because doctor runs the "
            "program several times; pass its answers as arguments or in a file"
        )
    if result.error:
        return f"the program failed: {result.error_type}: {result.error}"
    return (
        "the program ended, and none of its DataLoaders delivered two batches in this process; "
        "run a program with several ranks with one rank, and if a library keeps torch's loader "
        "under another name, create the loader by penstock.DataLoader"
    )


def cannot_repeat(failure: str, result: RunResult | None) -> str:
    """Explain why a second, unchanged run of the program failed."""
    kind = result.error_type if result is not None else ""
    reasons = {
        "FileExistsError": "it does not overwrite the output of its first run; have it write to a "
        "new folder each time, or remove that output",
        "FileNotFoundError": "its first run has used up or moved its input; have it leave its "
        "input in place",
    }
    why = reasons.get(
        kind,
        "the first run left or removed something that it needs; make the program repeatable",
    )
    return f"The program cannot be run twice: its second, unchanged run failed ({failure}): {why}."


def diagnosis_text(found: Examination) -> str:
    """Return the program's bottleneck, and the rates of the stages."""
    base = found.base
    settings = base.settings
    lines = [
        f"Loader {found.loader} (over {found.dataset}; num_workers={settings.num_workers}, "
        f"fetch_threads={settings.fetch_threads}, prefetch_factor={settings.prefetch_factor}, "
        f"persistent_workers={settings.persistent_workers}), {base.steps} steps.",
        "",
        *_wrapped(str(found.advice.diagnosis)),
        "",
        *table(["stage", "time per batch", "at most", "busy"], stage_rows(base)),
    ]
    waiting = sorted(base.waiting.items(), key=lambda one: -one[1])
    parts = [
        f"{format_time(seconds)} for {PARTS[name]}"
        for name, seconds in waiting
        if seconds > 0.01 * base.step_s
    ]
    lines += ["", "The program waits for "
              f"{format_share(base.waiting_s / max(base.step_s, 1e-12))} of a step of "
              f"{format_time(base.whole_step_s)}"
              + (f": {', '.join(parts)}." if parts else ".")]  # fmt: skip
    if found.movable_calls:
        rows = [
            [call.operator, call.device or "CPU", format_time(call.seconds)]
            for call in found.movable_calls
        ]
        lines += ["", *table(["call that workers could run", "runs on", "time per batch"], rows)]
    return "\n".join(lines)


def changes_text(found: Examination) -> str:
    """Return the trials, the advice as code, and further possible changes."""
    base = found.base
    lines = []
    if found.trials:
        rows = [["unchanged", "", format_time(base.whole_step_s), _rate(base.whole_step_s)]]
        rows += [_trial_row(found, trial) for trial in found.trials]
        lines += table(["change", "predicted step", "measured", "steps/s"], rows)
        failures = [trial for trial in found.trials if trial.failure]
        lines += [
            f"{_format_change(found, trial)} failed: {trial.failure.splitlines()[0]}"
            for trial in failures
        ]
        lines.append("")
    if found.cannot_repeat:
        lines += [*_wrapped(found.cannot_repeat), ""]
    lines += _advice_lines(found)
    return "\n".join(lines)


def stage_rows(seen: Observation) -> list[list[str]]:
    """Return the row of each stage: the seconds per batch, the rate that it alone would allow, and
    the share of the time in which it is busy."""
    at_once = max(1, seen.settings.num_workers) if not seen.has_pool else max(1, seen.pool_workers)
    who = f"{at_once} in parallel" if at_once > 1 else "1 in parallel"
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
            [name, format_time(seconds), f"{count / seconds:.3g} batches/s", format_share(busy)]
        )
    return rows


def as_record(found: Examination) -> dict[str, Any]:
    """Return the record for ``--json``; times are in seconds."""
    base = found.base
    observed = asdict(base)
    del observed["batches"]
    return {
        "schema": SCHEMA,
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
                "change": trial.settings.format_changes_from(base.settings),
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
        "unread_columns": _unread_record(found.columns),
    }


def _unread_record(columns: ColumnUse | None) -> dict[str, Any] | None:
    if columns is None or not columns.unread:
        return None
    return {
        "names": columns.unread,
        "kept": columns.kept,
        "sample_bytes": sum(columns.sample_bytes),
        "unread_share": columns.unread_share,
    }


def code(found: Examination) -> str | None:
    """Return the code for the fastest settings; None if the program has these already."""
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
            f"Advice: a step takes {format_time(found.best_step_s)} instead of "
            f"{format_time(base.whole_step_s)} ({gain:.2g} times as fast) with",
            "",
            *(f"    {line}" for line in advice.splitlines()),
        ]
        if note := side_effects_of(base, found.best):
            lines += ["", *_wrapped(note)]
    elif found.trials:
        lines.append(
            "Advice: leave the loader unchanged. None of the changes that were tried is faster."
        )
    elif not any(change.settings for change in found.advice.changes):
        lines.append("No option of the loader promises an improvement.")
    tried = {trial.settings for trial in found.trials}
    named = [
        one for one in found.advice.changes if one.settings is None or one.settings not in tried
    ]
    if named:
        lines += ["", "Not tried:" if found.trials else "Suggestions:"]
        for change in named:
            promise = (
                f" (predicted step: {format_time(change.predicted_step_s)})"
                if change.predicted_step_s is not None
                else ""
            )
            note = f" {change.note}" if change.note else ""
            lines += _wrapped(f"  - {change.text}{promise}.{note}", "    ")
    lines += _column_lines(found.columns)
    if base.memory_free_bytes is not None and base.batch_bytes > 0:
        ahead = found.best.ahead
        lines += ["", f"Batches of {format_bytes(base.batch_bytes)}, {ahead} ahead; "
                  f"{format_bytes(base.memory_free_bytes)} of memory are free."]  # fmt: skip
    return lines


def _column_lines(columns: ColumnUse | None) -> list[str]:
    if columns is None or not columns.unread:
        return []
    names = ", ".join(columns.unread)
    size = format_bytes(sum(columns.sample_bytes))
    text = (
        f"No code was seen to read the columns {names}: {format_share(columns.unread_share)} of "
        f"the {size} of a sample. Select the others where the program makes its dataset:"
    )
    return ["", *_wrapped(text), "", f"    dataset = dataset.select_columns({[*columns.kept]})"]


def _trial_row(found: Examination, trial: Trial) -> list[str]:
    measured = trial.measured_step_s
    return [
        _format_change(found, trial),
        format_time(trial.predicted_step_s),
        "failed" if measured is None else format_time(measured),
        "" if measured is None else _rate(measured),
    ]


def _format_change(found: Examination, trial: Trial) -> str:
    return trial.settings.format_changes_from(found.base.settings)


def _rate(seconds: float) -> str:
    return f"{1 / max(seconds, 1e-12):.3g}"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, _COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Format columns of text, the first left-aligned and the others right-aligned."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in [head, *rows]
    ]
