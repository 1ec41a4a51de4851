# SPDX-License-Identifier: Apache-2.0
"""The hand-written stubs of the native modules match them: every name, and no other."""

from __future__ import annotations

import ast
import importlib
import itertools
from pathlib import Path
from types import ModuleType

import pytest

from penstock import _C, _pool
from penstock_simulator import _simulator

_NOT_DECLARED = {"__doc__", "__file__", "__loader__", "__name__", "__package__", "__spec__"}


def _declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    names: dict[str, ast.stmt] = {}
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names[statement.name] = statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names[statement.target.id] = statement
    return names


def _present(owner: type | ModuleType) -> set[str]:
    # pybind11 adds a method to every class, which is not part of our interface.
    own = {name for name in vars(owner) if not name.startswith(("__", "_pybind11_"))}
    return own - _NOT_DECLARED


def _stub_differences(
    declared: dict[str, ast.stmt], owner: type | ModuleType, where: str
) -> list[str]:
    names = {name for name in declared if not name.startswith("__")}
    found = [f"{where}.{name} is declared and not there" for name in names - _present(owner)]
    found += [f"{where}.{name} is there and not declared" for name in _present(owner) - names]
    for name, statement in declared.items():
        if isinstance(statement, ast.ClassDef) and isinstance(getattr(owner, name, None), type):
            found += _stub_differences(
                _declared(statement.body), getattr(owner, name), f"{where}.{name}"
            )
    return found


@pytest.mark.parametrize("module", [_C, _pool, _simulator], ids=["_C", "_pool", "_simulator"])
def test_stub_and_native_module_have_the_same_names(module: ModuleType) -> None:
    package, _, name = module.__name__.rpartition(".")
    (folder,) = importlib.import_module(package).__path__
    stub = Path(folder) / f"{name}.pyi"
    declared = _declared(ast.parse(stub.read_text()).body)
    assert sorted(_stub_differences(declared, module, name)) == []


def test_native_modules_share_no_names() -> None:
    for one, other in itertools.combinations((_C, _pool, _simulator), 2):
        assert _present(one) & _present(other) == set()


def test_comparison_finds_names_missing_on_either_side() -> None:
    declared = _declared(ast.parse("def parse_graph(text: str) -> None: ...\ndef gone(): ...").body)
    found = _stub_differences(declared, _C, "_C")
    assert "_C.gone is declared and not there" in found
    assert "_C.tune_malloc is there and not declared" in found
