# SPDX-License-Identifier: Apache-2.0
"""The comparison of loaders: its checks on penstock and torch, its limits, and its page."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bench_runs import BENCH

COMPARISON = BENCH / "comparison"
MODULES = (
    *("compare", "environments", "job", "loaders", "page", "processes", "promises"),
    *("rates", "samples", "systems"),
)


@pytest.fixture(autouse=True)
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Imports of the harness, which leave no module with such a plain name to other tests."""
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.syspath_prepend(COMPARISON)
    before = {name: sys.modules.pop(name, None) for name in MODULES}
    yield
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def bench(system: str, folder: Path) -> Any:
    return module("promises").Bench(system, Path(sys.executable), folder)


def job_program(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Any:
    """A bench whose jobs run this program in the place of job.py."""
    program = folder / "program.py"
    program.write_text(text)
    monkeypatch.setattr(module("processes"), "JOB", program)
    return bench("torch", folder)


def outcome_of(*ids: int) -> Any:
    answers = [{"ids": list(ids), "draws": [0.5] * len(ids), "pids": [1]}, {"end": True}]
    return module("processes").Outcome(answers, has_ended=True)


@pytest.mark.slow
def test_torch_has_one_order_and_no_state(tmp_path: Path) -> None:
    promises = module("promises")
    torch = bench("torch", tmp_path)
    assert promises.same_order(torch) == "yes"
    assert promises.resume(torch) == "no: no state_dict()"
    assert promises.packing(torch).startswith("no: no packing")
    assert promises.remote_workers(torch).startswith("no: no workers outside")


@pytest.mark.slow
def test_torch_loses_the_epoch_with_a_worker(tmp_path: Path) -> None:
    found = module("promises").killed_worker(bench("torch", tmp_path))
    assert found.startswith("no: ")


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "promises",
    [
        ["killed_worker", "containers"],
        ["resume", "resume_with_more"],  # of one interrupted epoch
        ["packing"],
        ["drop_in"],
        ["remote_workers"],
        ["resume_with_fewer_ranks"],
    ],
    ids=", ".join,
)
def test_penstock_keeps_the_promise(promises: list[str], tmp_path: Path) -> None:
    penstock = bench("penstock", tmp_path)
    checks = module("promises").PROMISES
    assert [checks[name][1](penstock) for name in promises] == ["yes"] * len(promises)


@pytest.mark.slow
def test_rates_are_measured_in_turns(tmp_path: Path) -> None:
    rates = module("rates")
    pythons = {name: Path(sys.executable) for name in ("torch", "penstock")}
    plan = rates.Plan(rounds=2, seconds=0.1, warmup=0.1)
    logged: list[str] = []
    records = list(rates.measure(pythons, tmp_path, ["rows"], plan, logged.append))
    assert [record["system"] for record in records] == ["torch", "penstock"]
    assert all(len(record["rates"]) == 2 and min(record["rates"]) > 0 for record in records)
    assert records[0]["ratios"] == [1.0, 1.0]
    assert sum("round" in line for line in logged) == 2


@pytest.mark.slow
def test_command_runs_a_part_and_writes_the_page(tmp_path: Path) -> None:
    records = tmp_path / "comparison.json"
    arguments = ["--records", str(records), "--data", str(tmp_path / "data"), "--environments"]
    arguments += [str(tmp_path), "--systems", "torch", "--only", "promises"]
    assert module("compare").main([*arguments, "--promises", "packing"]) == 0
    stored = json.loads(records.read_text())
    assert stored["promises"]["torch"]["values"] == {
        "packing": "no: no packing of documents into rows"
    }
    assert str(tmp_path) not in records.read_text()
    page = records.with_suffix(".md")
    text = page.read_text()
    page.unlink()
    assert module("compare").main(["--records", str(records), "--page"]) == 0
    assert page.read_text() == text
    assert "no packing of documents into rows" in text


def test_page_needs_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        module("compare").main(["--records", str(tmp_path / "none.json"), "--page"])
    assert "has no records; run without --page first" in capsys.readouterr().err


def test_stored_page_is_made_of_the_stored_records() -> None:
    compare = module("compare")
    records = json.loads(compare.RECORDS.read_text())
    assert compare.RECORDS.with_suffix(".md").read_text() == module("page").page_of(records)


def test_page_has_values_reasons_and_ratios() -> None:
    page, promises, rates = module("page"), module("promises"), module("rates")
    run = {"date": "2026-01-02", "command": "make comparison", "machine": "2 cores"}
    values = dict.fromkeys(promises.PROMISES, "yes")
    records = {
        "systems": {"torch": {"versions": {"torch": "9.8.7"}}, "grain": {"not_run": "no wheel"}},
        "promises": {"torch": {**run, "values": values | {"resume": "no: no state_dict()"}}},
        "rates": {
            **run, "rounds": 3, "seconds": 1.0, "warmup": 0.5, "foreign_cores": 1.5,
            "values": [
                {"workload": "rows", "system": "torch", "rates": [2000.0], "ratios": [1.0]},
                {"workload": "rows", "system": "penstock", "rates": [3000.0, 5000.0, 9000.0],
                 "ratios": [1.5, 2.5, 4.5]},
                {"workload": "texts", "system": "spdl", "why_not": "no batch within 45 s"},
            ],
        },
    }  # fmt: skip
    text = " ".join(page.page_of(records).split())
    assert "torch 9.8.7" in text
    assert "- torch DataLoader: no state\\_dict()" in text
    assert text.count("Grain: not run: no wheel") == len(promises.PROMISES)
    assert "2.50 (1.50 to 4.50)" in text and "5,000 (3,000 to 9,000)" in text
    assert "SPDL, texts: no batch within 45 s" in text
    assert "busy machine" in text
    records["rates"]["foreign_cores"] = 0.0
    assert "busy machine" not in page.page_of(records)
    assert set(page.WORKLOADS) == set(rates.WORKLOADS)


def test_every_system_has_packages_a_class_and_a_configuration() -> None:
    environments, systems = module("environments"), module("systems")
    assert set(environments.REQUIREMENTS) == set(systems.SYSTEMS)
    for wanted in environments.REQUIREMENTS.values():
        assert all("==" in package for package in wanted.packages)
    for system in systems.SYSTEMS.values():
        assert system.title and system.configuration and system.packages


def test_missing_and_repeated_samples_are_counted() -> None:
    promises = module("promises")
    everything = range(promises.SAMPLE_COUNT)
    assert promises.once_each(outcome_of(*everything)) == "yes"
    assert promises.once_each(outcome_of(*everything[2:])) == "no: 2 of 2048 samples missing"
    assert promises.once_each(outcome_of(*everything, 5)) == "no: 1 samples repeated"
    assert promises.SAMPLE_COUNT == module("samples").COUNT


def test_hang_is_reported_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The child leaves the session and the process group, as daemons do.
    hanging = job_program(
        tmp_path, monkeypatch,
        "import json, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1e6)'],"
        " start_new_session=True)\n"
        "print(json.dumps({'child': child.pid}), flush=True)\n"
        "time.sleep(1e6)\n",
    )  # fmt: skip
    outcome = hanging.ask("stream", {}, limit_s=3)
    assert outcome.error == "did not end within 3 s" and not outcome.is_complete
    child = outcome.get("child")
    assert child and not is_running(child)


def test_death_of_the_trainer_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = job_program(tmp_path, monkeypatch, "import sys; sys.exit(7)")
    outcome = dying.ask("stream", {})
    assert outcome.error == "the trainer's process ended with exit status 7"


def test_package_that_cannot_be_installed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments, compare = module("environments"), module("compare")
    wanted = environments.Requirements((f"{tmp_path}/no-such-package.whl",))
    monkeypatch.setitem(environments.REQUIREMENTS, "grain", wanted)
    records = tmp_path / "comparison.json"
    arguments = ["--records", str(records), "--data", str(tmp_path / "data"), "--environments"]
    arguments += [str(tmp_path / "environments"), "--systems", "grain", "--only", "promises"]
    assert compare.main(arguments) == 0
    stored = json.loads(records.read_text())
    assert "no-such-package" in stored["systems"]["grain"]["not_run"]
    assert "grain" not in stored.get("promises", {})
    assert "| Grain" in records.with_suffix(".md").read_text()


def test_installed_environment_is_not_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = module("environments")
    commands: list[list[str]] = []

    def run(command: list[str]) -> None:
        commands.append(command)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        (tmp_path / "grain/lib" / version / "site-packages").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(environments, "_run", run)
    for _ in range(2):
        python = environments.python_of("grain", tmp_path, lambda _: None)
        assert python == tmp_path / "grain/bin/python"
    assert len(commands) == 2  # venv and pip, once


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
