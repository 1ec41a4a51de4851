# SPDX-License-Identifier: Apache-2.0
"""The JSON of commands and reports follows the schemas that are installed with the package, and
every error has a code that the documents list."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_models import SideBranch, mapping
from jsonschema import Draft202012Validator, ValidationError
from offload_training import fresh
from page_snippets import GUIDE, ROOT
from setuptools import Distribution
from setuptools.command.build_py import build_py

import penstock
from penstock import DataLoader, cached, errors, explain
from penstock.cli.command_parser import asks_for_json
from penstock.doctor.examination import Examination, Trial, as_record
from penstock.doctor.program_runs import ColumnUse, MovableCall
from penstock.errors import PenstockError, PoolWarning, code_of
from penstock.tuning.advice import advise
from penstock.tuning.limiting import Limit
from penstock.tuning.observation import LoaderSettings, Observation

PACKAGE = ROOT / "python" / "penstock"
SCHEMAS = sorted((PACKAGE / "schemas").glob("*.json"))
ERRORS_PAGE = ROOT / "docs" / "reference" / "errors.md"
ROWS = torch.utils.data.TensorDataset(torch.zeros(32, 2))


def schema_of(name: str) -> dict[str, Any]:
    """The schema, changed to allow only the fields that it describes."""
    found: dict[str, Any] = json.loads((PACKAGE / "schemas" / f"{name}.json").read_text())
    return closed(found)


def closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: closed(one) for key, one in schema.items()}
    if isinstance(schema.get("properties"), dict):
        changed.setdefault("additionalProperties", False)
    return changed


def check(name: str, record: Any) -> None:
    Draft202012Validator(schema_of(name)).validate(record)
    assert record["schema"] == f"penstock.{name}/1"


def penstock_command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
    )


def failure(code: str, exit_code: int, *arguments: str, folder: Path) -> str:
    """Runs a command that fails; returns the message."""
    done = penstock_command(*arguments, folder=folder)
    assert done.returncode == exit_code, done.stderr
    record = json.loads(done.stdout)
    check("error", record)
    assert record["error"]["code"] == code
    assert record["error"]["message"] in done.stderr
    return str(record["error"]["message"])


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_schema_is_valid_and_on_the_page(path: Path) -> None:
    schema = json.loads(path.read_text())
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == schema["properties"]["schema"]["const"] == f"penstock.{path.stem}/1"
    page = (ROOT / "docs" / "reference" / "json.md").read_text()
    assert f"[{schema['$id']}](../../python/penstock/schemas/{path.name})" in page


def test_undescribed_and_missing_fields_are_found() -> None:
    record = {"schema": "penstock.error/1", "error": {"code": "usage", "message": ""}}
    check("error", record)
    for wrong in (
        {**record, "more": 1},
        {**record, "error": {"code": "usage"}},
        {**record, "error": {"code": 1, "message": ""}},
    ):
        with pytest.raises(ValidationError):
            check("error", wrong)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_report_follows_its_schema(workers: int) -> None:
    loader = DataLoader(ROWS, batch_size=4, num_workers=workers, name="train")
    check("report", json.loads(loader.report().to_json()))  # before the first step
    assert len(list(loader)) == 8
    report = json.loads(loader.report().to_json())
    check("report", report)
    assert report["cache"] is None
    kept = DataLoader(cached(ROWS, memory="1MB"), batch_size=4, num_workers=workers)
    assert len(list(kept)) == 8
    report = json.loads(kept.report().to_json())
    check("report", report)
    assert report["cache"]["misses"] == 32


def test_plan_follows_its_schema() -> None:
    check("plan", json.loads(explain(fresh(SideBranch), mapping(0), cut="maximal").to_json()))
    refused = penstock.Plan(refused="it has no tensors")
    check("plan", json.loads(refused.to_json()))


def test_diagnosis_follows_its_schema() -> None:
    base = Observation(
        LoaderSettings(num_workers=2),
        40,
        0.02,
        waiting={"dataset_s": 0.015},
        dataset_s=0.03,
        worker_cpu_s=0.001,
        epoch_steps=100,
        memory_free_bytes=2**33,
        slow_samples=((0.5, "sample 3"),),
        cpus=4,
    )
    found = Examination(
        0,
        "Images",
        base,
        advise(base),
        trials=[
            Trial(LoaderSettings(num_workers=4), 0.01, 0.011),
            Trial(LoaderSettings(num_workers=2, fetch_threads=16), 0.005, None, "it failed"),
        ],
        best=LoaderSettings(num_workers=4),
        best_step_s=0.011,
        movable_calls=(MovableCall("mul at model.py:3", 0.001),),
        columns=ColumnUse(("image", "text"), (600.0, 200.0), ("text",)),
    )
    record = json.loads(json.dumps(as_record(found)))
    check("doctor", record)
    assert record["unread_columns"]["unread_share"] == 0.25
    assert record["advice"] and record["changes"]
    limits = schema_of("doctor")["properties"]["limit"]["enum"]
    assert sorted(limits) == sorted(one.value for one in Limit)


PROGRAM = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(2, 1)
if __name__ == "__main__":
    {before}
    print("output of the program")
    for (rows,) in DataLoader(TensorDataset(torch.zeros(64, 2)), 2, num_workers=1):
        {step}
"""


@pytest.mark.long
@pytest.mark.slow
def test_json_of_commands_follows_the_schemas(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.format(before="pass", step="model(rows * 2)"))
    for name, *arguments in (
        ("environment", "env", "--json"),
        ("plan", "explain", "--json", "train.py"),
        ("plan", "explain", "--format", "json", "train.py"),
        ("doctor", "doctor", "--json", "--trials", "1", "--steps", "4", "train.py"),
    ):
        done = penstock_command(*arguments, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        check(name, json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("code", "exit_code", "arguments"),
    [
        ("usage", 2, ("env", "--json", "--verbose")),
        ("usage", 2, ("doctor", "--json", "--trails", "3", "train.py")),
        ("usage", 2, ("doctor", "--json", "missing.py")),
        ("program-missing", 2, ("explain", "--json", "missing.py")),
        ("invalid-argument", 1, ("status", "--json", "--controller", "nonsense")),
    ],
)
def test_failed_command_prints_its_code(
    code: str, exit_code: int, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    assert failure(code, exit_code, *arguments, folder=tmp_path)


@pytest.mark.long
@pytest.mark.slow
def test_program_without_a_plan_prints_its_code(tmp_path: Path) -> None:
    (tmp_path / "no_model.py").write_text(PROGRAM.format(before="pass", step="pass"))
    failure("no-plan", 1, "explain", "--json", "no_model.py", folder=tmp_path)
    (tmp_path / "fails.py").write_text(PROGRAM.format(before="int('x')", step="pass"))
    message = failure("program-failed", 1, "explain", "--json", "fails.py", folder=tmp_path)
    assert message.startswith("ValueError: invalid literal")
    (tmp_path / "exits.py").write_text(PROGRAM.format(before="sys.exit(3)", step="pass"))
    done = penstock_command("explain", "--json", "exits.py", folder=tmp_path)
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["code"] == "program-failed"
    failure("not-examinable", 1, "doctor", "--json", "fails.py", folder=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["doctor", "--json", "train.py"], True),
        (["doctor", "--trials", "3", "--json", "-m", "train"], True),
        (["explain", "--format", "json", "train.py"], True),
        (["doctor", "train.py", "--json"], False),
        (["doctor", "-m", "train", "--json"], False),
        (["explain", "--format", "dot", "train.py"], False),
    ],
)
def test_options_of_the_program_ask_for_no_json(arguments: list[str], expected: bool) -> None:
    assert asks_for_json(arguments) is expected


def own_exceptions() -> dict[str, str | None]:
    """The code in the body of each class that derives from PenstockError or PoolWarning, from the
    sources: importing all of them would need every optional package."""
    bases: dict[str, set[str]] = {}
    codes: dict[str, str | None] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
                codes[node.name] = next(
                    (
                        one.value.value
                        for one in node.body
                        if isinstance(one, ast.Assign)
                        and isinstance(one.value, ast.Constant)
                        and [ast.unparse(target) for target in one.targets] == ["code"]
                    ),
                    None,
                )
    found = {"PenstockError", "PoolWarning"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return {name: codes[name] for name in found}


def test_every_exception_has_a_code_of_its_own() -> None:
    codes = own_exceptions()
    public = [
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, (PenstockError, PoolWarning))
    ]
    assert set(public) <= set(codes) and len(codes) > len(public)
    assert [name for name, code in codes.items() if code is None] == []
    assert len(set(codes.values())) == len(codes)


def codes_of_page(page: Path) -> list[str]:
    """The codes in the first column of the page's table of codes."""
    table = page.read_text(encoding="utf-8").partition("\n| code |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row)]


def test_page_of_codes_lists_every_code_once() -> None:
    listed = codes_of_page(ERRORS_PAGE)
    assert len(set(listed)) == len(listed)
    builtin = {code_of(one()) for one in (ValueError, TypeError, OSError, ImportError)}
    # Of commands, each with a test above.
    commands = {"usage", "program-missing", "program-failed", "no-plan", "interrupted"}
    assert set(listed) == {*own_exceptions().values(), *builtin, *commands}
    sources = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert [code for code in listed if f'"{code}"' not in sources] == []


def test_guide_lists_only_existing_codes() -> None:
    listed = codes_of_page(GUIDE)
    assert len(listed) > 10
    assert set(listed) <= set(codes_of_page(ERRORS_PAGE))


def test_code_of_builtin_and_own_errors() -> None:
    assert code_of(errors.RankError("")) == "ranks-disagree"
    assert code_of(errors.PoolWarning("")) == "pool-warning"
    assert code_of(FileNotFoundError()) == "system-call-failed"
    assert code_of(KeyboardInterrupt()) == "interrupted"
    assert code_of(RuntimeError()) == "failed"
    with pytest.raises(ValueError, match="batch_size") as raised:
        DataLoader(ROWS, batch_size=0)
    assert code_of(raised.value) == "invalid-argument"


def test_guide_is_an_agent_skill() -> None:
    head = re.fullmatch(r"---\n(.*?)\n---\n\n# .*", GUIDE.read_text(), re.DOTALL)
    assert head is not None
    fields = dict(re.findall(r"^(\w+): (.+(?:\n  .+)*)", head[1], re.MULTILINE))
    assert set(fields) == {"name", "description"}
    assert fields["name"] == GUIDE.parent.name == "penstock"
    assert len(fields["description"]) <= 1024  # the limit of the format


def test_guide_and_schemas_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files()
    command = build_py(distribution)
    command.finalize_options()
    command.manifest_files = {}  # of include-package-data, which is off
    found = {Path(one) for one in command.find_data_files("penstock", "python/penstock")}
    assert {one.resolve() for one in found} >= {GUIDE, *SCHEMAS}


def test_guide_command_prints_the_installed_guide(tmp_path: Path) -> None:
    path = Path(penstock_command("guide", "--path", folder=tmp_path).stdout.rstrip("\n"))
    assert path.is_relative_to(Path(penstock.__file__).parent)
    text = path.read_text(encoding="utf-8")
    assert penstock_command("guide", folder=tmp_path).stdout == text == GUIDE.read_text()
