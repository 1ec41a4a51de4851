# SPDX-License-Identifier: Apache-2.0
"""The continuous-integration workflow: a file by its schema, whose commands the Makefile has and
whose torches and Pythons are the supported ones. No runner is used."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from supported_versions import MISSING_WHEELS, PYTHONS, TORCHES

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
Workflow = dict[str, Any]


def faults(workflow: Workflow) -> Iterator[str]:
    """By the schema that schemastore.org publishes, as packaged with check-jsonschema."""
    folder = files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((folder / "github-workflows.json").read_text("utf-8"))
    validator = jsonschema.validators.validator_for(schema)(schema)
    for error in validator.iter_errors(workflow):
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


@pytest.fixture
def workflow() -> Workflow:
    # `on` is a truth value in PyYAML's YAML, and a name in the runners'.
    loaded = yaml.safe_load(WORKFLOW.read_text("utf-8"))
    assert isinstance(loaded, dict)
    loaded["on"] = loaded.pop(True)
    return loaded


def combinations(matrix: dict[str, Any]) -> list[dict[str, str]]:
    """The combinations of a matrix, as the runners make them: an entry of ``include`` that changes
    no value of the lists is added to the combinations that have it, any other is one more."""
    lists = {name: values for name, values in matrix.items() if name not in ("include", "exclude")}
    found = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    gone = matrix.get("exclude", [])
    found = [one for one in found if not any(one.items() >= out.items() for out in gone)]
    return found + matrix.get("include", [])


def test_workflow_matches_the_published_schema(workflow: Workflow) -> None:
    assert list(faults(workflow)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("on",), {"pushed": None}),
        (("jobs", "lint", "runs_on"), "ubuntu-22.04"),
        (("jobs", "lint", "steps"), [{"uses": 1}]),
        (("jobs", "test", "strategy", "fail-fast"), 3),
        (("permissions", "contents"), "everything"),
    ],
)
def test_planted_fault_is_found(workflow: Workflow, path: tuple[str, ...], value: object) -> None:
    broken = copy.deepcopy(workflow)
    place = broken
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    assert list(faults(broken)) != []


def test_workflow_commands_exist_in_the_makefile(workflow: Workflow) -> None:
    rules = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    commands = set()
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            for name in re.findall(r"\bmake ((?:\$\{\{[^}]*\}\})|\S+)", step.get("run", "")):
                if of_matrix := re.fullmatch(r"\$\{\{ matrix\.(\w+) \}\}", name):
                    commands |= {one[of_matrix[1]] for one in combinations(matrix)}
                else:
                    commands.add(name)
    assert {"lint", "test", "test-contract", "test-asan"} <= commands
    assert commands <= set(rules)


def test_every_supported_torch_and_python_pair_is_tested(workflow: Workflow) -> None:
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    tested = [(one["torch"], one["python"]) for one in combinations(matrix)]
    pairs = set(itertools.product(TORCHES, PYTHONS)) - MISSING_WHEELS
    assert sorted(set(tested)) == sorted(pairs)
    whole = {
        (one["torch"], one["python"]) for one in combinations(matrix) if one["suite"] == "test"
    }
    assert {torch for torch, _ in whole} == {TORCHES[0], TORCHES[-1]}


def test_actions_are_pinned_to_tags_or_commits(workflow: Workflow) -> None:
    used = [
        step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step
    ]
    assert used
    assert [name for name in used if not re.search(r"@(v\d+|[0-9a-f]{40})$", name)] == []


def test_ci_run_script_runs_make_test(workflow: Workflow) -> None:
    assert "exec make test" in (ROOT / ".ci" / "run").read_text("utf-8")
