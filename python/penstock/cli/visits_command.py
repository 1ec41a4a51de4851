# SPDX-License-Identifier: Apache-2.0
"""The command visits: what the record of a program's samples shows, in sentences or as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock import _pool
from penstock.cli.command_parser import CommandError, CommandParser, run_subcommand
from penstock.errors import PenstockError, code_of

_SCHEMA = "penstock.visits/1"
_SAMPLES_MAX = 8  # of a list in a sentence
_LINES_MAX = 20  # about one kind of fault of an epoch
_FAULTY_EXIT_CODE = 1
_FILES = "visits.rank*of*"
Finding = tuple[bool, str]  # whether it is a fault, and a sentence


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code. Raises CommandError for arguments that it does not
    accept, and for a folder without a readable record."""
    return run_subcommand({"visits": _visits}, command, arguments)


def _visits(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "visits",
        "visits [OPTION ...] FOLDER [FOLDER]",
        """\
Reads the record of loader.record_visits(FOLDER) or of `penstock run --record-visits FOLDER`. Shows
whether each epoch gave each sample once, and which steps repeat others, also in a resumed program.
With two folders, shows where two runs part: the first step that has other samples, or the same in
another order, for any numbers of ranks.""",
        """\
Two runs are compared by the roots of the Merkle trees (RFC 6962, SHA-256) over their batches, which
are stored next to the records. If the roots are equal, nothing else is read.

The exit code is 0 without a fault, 1 with one, and 2 if a folder has no record that can be read.

examples:
  penstock visits run/visits
  penstock visits run-a/visits run-b/visits
  penstock visits --json run/visits > visits.json""",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="folder of a record")
    options = parser.parse(arguments)
    if len(options.folders) > 2:
        raise CommandError(f"unexpected argument {options.folders[2]!r}", parser.command)
    try:
        record = _record_of([Path(one) for one in options.folders])
    except (PenstockError, ValueError) as error:
        raise CommandError(str(error), parser.command, code_of(error)) from error
    if options.json:
        print(json.dumps(record, indent=2))
    else:
        print("\n".join(_lines(record)))
    return _FAULTY_EXIT_CODE if record["has_faults"] else 0


def _record_of(folders: list[Path]) -> dict[str, Any]:
    loaders = [_folders_of_loaders(one) for one in folders]
    record: dict[str, Any] = {"schema": _SCHEMA}
    if len(folders) == 1:
        record["records"] = [_audit(folder) for folder in loaders[0]]
    else:
        names = [[one.name for one in of_run] for of_run in loaders]
        if len(loaders[0]) > 1 and names[0] != names[1]:
            raise ValueError(
                f"{folders[0]} and {folders[1]} must have records of the same loaders, got "
                f"{', '.join(names[0])} and {', '.join(names[1])}; name the folders of one loader"
            )
        record["comparisons"] = [_compare(a, b) for a, b in zip(*loaders, strict=True)]
    found = [*record.get("records", ()), *record.get("comparisons", ())]
    record["has_faults"] = any(one["faults"] for one in found)
    return record


def _folders_of_loaders(folder: Path) -> list[Path]:
    """Return the folders with records: this one or, of a whole program, those of its loaders."""
    if not any(folder.glob(_FILES)):
        inner = [one for one in folder.glob("*") if any(one.glob(_FILES))]
        if inner:
            return sorted(inner, key=lambda one: (len(one.name), one.name))
    return [folder]  # whose absence is reported by the native part


def _audit(folder: Path) -> dict[str, Any]:
    record = _pool.VisitFolder.open(str(folder))
    roots, audit = record.roots(), record.audit()
    findings = [*_findings(audit)]
    return {
        "folder": str(folder),
        "roots": roots,
        **_as_json(audit),
        "faults": [text for is_fault, text in findings if is_fault],
        "notes": [text for is_fault, text in findings if not is_fault],
    }


def _compare(a: Path, b: Path) -> dict[str, Any]:
    of_a, of_b = _pool.VisitFolder.open(str(a)), _pool.VisitFolder.open(str(b))
    began_at = time.perf_counter()
    found = _pool.VisitFolder.compare(of_a, of_b)
    took_s = time.perf_counter() - began_at
    findings = [*_differences(found, str(a), str(b))]
    return {
        "folders": [str(a), str(b)],
        "seconds": took_s,
        **_as_json(found),
        "faults": [text for is_fault, text in findings if is_fault],
        "notes": [text for is_fault, text in findings if not is_fault],
    }


_PLACES = ("first", "last", "again", "place", "place_a", "place_b", "other", "differs_from")


def _as_json(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _as_json(one, key) for key, one in value.items()}
    if name in _PLACES and isinstance(value, tuple):
        return {"epoch": value[0], "step": value[1]}
    if name == "missing_ranks":
        return [{"epoch": one[0], "step": one[1], "rank": one[2]} for one in value]
    if name == "missing_steps":
        return [{"epoch": one[0], "step": one[1]} for one in value]
    if isinstance(value, (list, tuple)):
        return [_as_json(one) for one in value]
    return value


def _lines(record: dict[str, Any]) -> Iterator[str]:
    for one in record.get("records", ()):
        yield f"{one['folder']}:"
        for root in one["roots"]:
            yield f"  rank {root['rank']} of {root['world_size']}: root {root['root']}"
        yield from _findings_lines(one)
    for one in record.get("comparisons", ()):
        yield f"{one['folders'][0]} and {one['folders'][1]}:"
        yield from _findings_lines(one)
    yield "a fault was found" if record["has_faults"] else "no fault was found"


def _findings_lines(one: dict[str, Any]) -> Iterator[str]:
    yield from (f"  {text}" for text in one["notes"])
    yield from (f"  fault: {text}" for text in one["faults"])


def _findings(audit: dict[str, Any]) -> Iterator[Finding]:
    for number, session in enumerate(audit["sessions"], 1):
        yield False, _session_text(number, session)
    for again in audit["given_again"]:
        yield _given_again(again)
    for other in audit["other_datasets"]:
        yield (
            True,
            f"from {_place(other['place'])} on the data set is {other['after']!r}, and before it "
            f"was {other['before']!r}",
        )
    for epoch in audit["epochs"]:
        yield from _of_epoch(epoch, audit["sessions"])
    for torn in audit["torn"]:
        where = f"{torn['path']} has no record at byte {torn['offset']}"
        if torn["is_damaged_inside"]:
            yield True, f"{where}, where bytes were changed: the {torn['bytes']} after it are lost"
        else:
            yield (
                False,
                f"{where}: its last {torn['bytes']} bytes are of an unfinished one, as the "
                f"failure of a machine leaves it; the records before it are complete",
            )


def _session_text(number: int, session: dict[str, Any]) -> str:
    world_size = session["world_size"]
    ranks = "1 rank" if world_size == 1 else f"{len(session['ranks'])} of {world_size} ranks"
    if world_size > 1 and len(session["ranks"]) == world_size:
        ranks = f"{world_size} ranks"
    sampler = f", {session['sampler']}" if session["sampler"] else ""
    text = f"session {number}: {session['loader']} over {session['dataset']}{sampler}; {ranks}"
    if session["first"] is None:
        return f"{text}; no batch"
    shift = (session["epoch_shift"], session["step_shift"])
    first = _shifted(session["first"], shift)
    last = _shifted(session["last"], shift)
    return f"{text}; {_place(first)} to {_place(last)}"


def _shifted(place: tuple[int, int], shift: tuple[int, int]) -> tuple[int, int]:
    epoch, step = place
    return epoch + shift[0], step + (shift[1] if epoch == 0 else 0)


def _given_again(again: dict[str, Any]) -> Finding:
    session, earlier = again["session"] + 1, again["earlier"] + 1
    steps = _steps(again["first"], again["last"], again["steps"])
    if again["differs_from"] is None:
        return (
            False,
            f"session {session} gives {steps} again, with the same samples as session {earlier}",
        )
    return (
        True,
        f"session {session} gives {steps} again, and from {_place(again['differs_from'])} on "
        f"with other samples or in another order than session {earlier}",
    )


def _of_epoch(epoch: dict[str, Any], sessions: list[dict[str, Any]]) -> Iterator[Finding]:
    number = epoch["epoch"]
    faults = [*_faults_of(epoch)]
    text = f"epoch {number}: {_count(epoch['steps'], 'step')}, {_count(epoch['samples'], 'sample')}"
    end = "" if epoch["has_ended"] else "; it has not ended"
    size = sessions[-1]["dataset_size"]
    if epoch["unknown"] or (epoch["samples"] == 0 and size < 0):
        yield False, f"{text}, whose indices are not known{end}"
    elif epoch["may_repeat"]:
        yield False, f"{text}, {epoch['distinct']} different ones of a sampler that repeats{end}"
    elif epoch["doubled_samples"]:
        yield False, f"{text}, {epoch['distinct']} different ones{end}"
    elif epoch["has_ended"] and epoch["distinct"] == size:
        times = "once" if epoch["samples"] == size else "at least once"
        yield False, f"{text}, each of the data set's {size} {times}{_padding(epoch)}"
    else:
        left_out = epoch["left_out_samples"]
        rest = f", without {left_out} that the sampler leaves out" if left_out else ""
        yield False, f"{text}, none twice{rest}{_padding(epoch)}{end}"
    yield from ((True, fault) for fault in faults)


def _padding(epoch: dict[str, Any]) -> str:
    count = epoch["padding_samples"]
    if count == 0:
        return ""
    return f"; the last step gives {_count(count, 'sample')} again, so that each rank has as many"


def _faults_of(epoch: dict[str, Any]) -> Iterator[str]:
    number = epoch["epoch"]
    if epoch["missing_step_count"]:
        steps = [step for _, step in epoch["missing_steps"]]
        yield (
            f"epoch {number} lacks {_count(epoch['missing_step_count'], 'step')}: "
            f"{_listed(_runs(steps))}"
        )
    for _, step, rank in epoch["missing_ranks"][:_LINES_MAX]:
        yield f"rank {rank} has no step {step} of epoch {number}"
    if epoch["missing_samples"]:
        yield (
            f"epoch {number} has ended without {_count(epoch['missing_samples'], 'sample')}"
            f"{' more than the sampler leaves out' if epoch['left_out_samples'] else ''}: "
            f"{_listed([tuple(one) for one in epoch['missing']])}"
        )
    if epoch["may_repeat"]:
        return
    repeats = [*_repeats(epoch["doubled"])]
    yield from (f"epoch {number}: {text}" for text in repeats[:_LINES_MAX])
    if len(repeats) > _LINES_MAX or epoch["doubled_samples"] > sum(
        one["count"] for one in epoch["doubled"]
    ):
        yield f"epoch {number} gives {epoch['doubled_samples']} samples again in all"


def _repeats(doubled: list[dict[str, Any]]) -> Iterator[str]:
    """Describe the samples that steps give again; neighbouring whole steps together."""
    place = 0
    while place < len(doubled):
        one = doubled[place]
        length = 1
        while one["is_whole_step"] and place + length < len(doubled):
            follower = doubled[place + length]
            is_next = follower["is_whole_step"] and all(
                follower[name][1] == one[name][1] + length for name in ("again", "first")
            )
            if not is_next:
                break
            length += 1
        again, first = one["again"][1], one["first"][1]
        if length > 1:
            yield (
                f"steps {again} to {again + length - 1} repeat steps {first} to "
                f"{first + length - 1}"
            )
        elif one["is_whole_step"]:
            yield f"step {again} repeats step {first}"
        else:
            while (
                place + length < len(doubled) and doubled[place + length]["again"] == one["again"]
            ):
                length += 1
            yield _samples_again(doubled[place : place + length])
        place += length


def _samples_again(parts: list[dict[str, Any]]) -> str:
    """Describe the samples that one step gives again, by the steps that gave them first."""
    again = parts[0]["again"][1]
    count = sum(one["count"] for one in parts)
    samples = [sample for one in parts for sample in one["samples"]]
    steps = sorted({one["first"][1] for one in parts})
    source = ("step " if len(steps) == 1 else "steps ") + _listed(_runs(steps))
    if steps == [again]:
        source = "itself"
    listed = _first_of(samples, count)
    return f"step {again} gives {_count(count, 'sample')} of {source} again: {listed}"


def _first_of(samples: list[int], count: int) -> str:
    shown = samples[:_SAMPLES_MAX]
    return ", ".join(map(str, shown)) + (", ..." if count > len(shown) else "")


def _differences(found: dict[str, Any], a: str, b: str) -> Iterator[Finding]:
    if found["is_by_roots"]:
        yield False, "the runs are equal: all their roots are"
        return
    dataset = found["dataset"]
    if dataset is not None:
        yield (
            True,
            f"from {_place(dataset['place'])} on the data sets differ: {dataset['before']!r} in "
            f"{a}, {dataset['after']!r} in {b}",
        )
    steps = min(found["steps_a"], found["steps_b"])
    if found["parting"] == "none":
        yield False, f"all {_count(steps, 'step')} have the same samples in the same order"
        more = abs(found["steps_a"] - found["steps_b"])
        if more:
            longer = a if found["steps_a"] > found["steps_b"] else b
            yield False, f"{longer} has {_count(more, 'step')} more"
        return
    yield True, f"the runs part at {_place(found['place_a'])}: {_parting(found, b)}"
    yield False, f"{found['differing_steps']} of {_count(steps, 'step')} differ"


def _parting(found: dict[str, Any], b: str) -> str:
    parting = found["parting"]
    if parting == "order":
        return f"{b} has the same samples in another order"
    if parting == "step-missing":
        return f"{b} lacks this step"
    if parting == "step-added":
        return f"{b} has a step more here"
    if parting == "step-repeated":
        return f"{b} repeats {_place(found['other'])}"
    if parting == "steps-swapped":
        return f"{b} has this step and {_place(found['other'])} in each other's place"
    texts = []
    for name, verb in (("only_a", "lacks"), ("only_b", "has")):
        count, samples = found[f"{name}_count"], found[name]
        if count:
            extra = " that it should not have" if verb == "has" else ""
            texts.append(f"{verb} {_count(count, 'sample')}{extra}: {_first_of(samples, count)}")
    return f"{b} {' and '.join(texts)}"


def _place(place: Sequence[int]) -> str:
    return f"epoch {place[0]}, step {place[1]}"


def _steps(first: Sequence[int], last: Sequence[int], count: int) -> str:
    if count == 1:
        return _place(first)
    return f"{count} steps, {_place(first)} to {_place(last)},"


def _count(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] + 1 == number:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _listed(runs: list[tuple[int, ...]] | list[tuple[int, int]]) -> str:
    texts = [str(one[0]) if one[0] == one[1] else f"{one[0]} to {one[1]}" for one in runs]
    more = ", ..." if len(texts) > _LINES_MAX else ""
    return ", ".join(texts[:_LINES_MAX]) + more
