# SPDX-License-Identifier: Apache-2.0
"""The parts of a program that a captured graph depends on and Dynamo does not guard.

Dynamo takes it that the environment, classes and functions stay as they were when it captured a
graph. A program may replace a method between two epochs, or read a variable that it sets. A look
at all of that takes some microseconds, so it is taken before each call; where something moved, the
graph is compared with the forward itself (`eager_comparison.py`).
"""

from __future__ import annotations

import os
import types
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from penstock.seams.dynamo import patch_modules
from penstock.seams.modules import global_hooks
from penstock.seams.process_group import default_group

_MISSING = object()


class ProgramState:
    """Confined to one thread."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        """`modules` are those of the model, with all that are inside of them."""
        patch_modules()  # else the first capture would be a change of the program
        # Mappings that live, how people call them, and copies.
        self._watched: list[tuple[Mapping[Any, Any], str, dict[Any, Any]]] = []
        self._kinds: set[type] = set()
        functional = vars(torch.nn.functional)
        self._watched.append((functional, "torch.nn.functional.", dict(functional)))
        self.watch(modules)
        self._variables = _variables()
        self._variables_then = dict(self._variables)
        self._hooks_then = [dict(hooks) for hooks in global_hooks()]
        self._group_then = default_group()

    def watch(self, modules: list[torch.nn.Module]) -> None:
        """Watches the classes of these modules, too."""
        kinds = _classes_of(modules)
        for kind in kinds - self._kinds:
            self._watched.append((vars(kind), f"{kind.__qualname__}.", dict(vars(kind))))
        self._kinds |= kinds

    def changes(self) -> list[str]:
        """Names what was changed since this was asked last."""
        changed: list[str] = []
        if self._variables != self._variables_then:
            now, then = self._variables, self._variables_then
            names = sorted(
                os.fsdecode(name)
                for name in now.keys() | then.keys()
                if now.get(name) != then.get(name)
            )
            changed += [f"os.environ[{name!r}]" for name in names]
            self._variables_then = dict(now)
        for place, (living, name, copy) in enumerate(self._watched):
            if not _is_same(living, copy):
                self._watched[place] = (living, name, dict(living))
                changed += [name + one for one in _replaced(copy, living)]
        hooks = global_hooks()
        if any(map(_differ, hooks, self._hooks_then)):
            self._hooks_then = [dict(one) for one in hooks]
            changed.append("a hook for all modules")
        if default_group() is not self._group_then:
            self._group_then = default_group()
            changed.append("the process group")
        return changed


class ProgramStamp:
    """The state of a program, to be held by what must keep nothing of it: functions are held
    weakly."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        patch_modules()
        self._kinds = [weakref.ref(kind) for kind in _classes_of(modules)]
        self._then = self._now()

    def is_as_it_was(self) -> bool:
        """Whether nothing was changed since it was made."""
        return self._then == self._now()

    def _now(self) -> tuple[Any, ...]:
        kinds = [kind() for kind in self._kinds]
        places = [vars(torch.nn.functional), *(vars(kind) for kind in kinds if kind is not None)]
        return (
            len(places),
            dict(_variables()),
            [{name: _weakly(one) for name, one in place.items()} for place in places],
            [list(hooks) for hooks in global_hooks()],  # by numbers that are given once
            id(default_group()),
        )


def _classes_of(modules: list[torch.nn.Module]) -> set[type]:
    return {kind for module in modules for kind in type(module).__mro__ if kind is not object}


def _variables() -> Mapping[Any, Any]:
    """The environment, without decoding each variable."""
    variables: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
    return variables


def _weakly(value: Any) -> Any:
    """What tells a function or a property from another, and keeps neither. Dynamo guards plain
    values."""
    if isinstance(value, property):
        return [_weakly(one) for one in (value.fget, value.fset, value.fdel)]
    value = getattr(value, "__func__", value)  # of a static method or one of a class
    return weakref.ref(value) if isinstance(value, types.FunctionType) else None


def _differ(living: Mapping[Any, Any], copy: Mapping[Any, Any]) -> bool:
    return bool(living or copy) and not _is_same(living, copy)


def _is_same(living: Mapping[Any, Any], copy: Mapping[Any, Any]) -> bool:
    try:
        return bool(living == copy)
    except Exception:  # of a value that cannot be compared with the one before, such as an array
        return False


def _replaced(then: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[str]:
    """The functions, methods and properties that are others now. Dynamo guards plain values."""
    names = [
        str(name)
        for name in now.keys() | then.keys()
        if now.get(name, _MISSING) is not then.get(name, _MISSING)
        and any(
            callable(value) or hasattr(type(value), "__get__")
            for value in (now.get(name), then.get(name))
        )
    ]
    return sorted(names)


def shadowed_parts(modules: list[torch.nn.Module]) -> list[str]:
    """Names submodules, parameters and buffers that an attribute of the same name hides."""
    return [
        f"{type(module).__name__}.{name}"
        for module in modules
        for parts in (module._modules, module._parameters, module._buffers)
        for name in parts
        if name in vars(module)
    ]
