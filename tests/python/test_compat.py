# SPDX-License-Identifier: Apache-2.0
"""A torch that lacks a private name: the error names it, and features that do not need it work."""

from __future__ import annotations

import contextvars
import gc
import importlib
import linecache
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import fx

from penstock.compat.dynamo import config, with_settings
from penstock.compat.modules import Patch, graph_module
from penstock.compat.require import require
from penstock.errors import MissingTorchNameError, UnsupportedError

MODULES = (
    "dynamo",
    "fake_tensors",
    "iterators",
    "modules",
    "operators",
    "storages",
)

# A possible future torch: this one, without the name {0}.
_WITHOUT = """
import torch, {home}
del {name}
import penstock
"""
_LOADS = """
class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index, index * index])

arguments = dict(batch_size=4, shuffle=True, num_workers=2, multiprocessing_context="fork")
torch.manual_seed(3)
expected = [batch.tolist() for batch in torch.utils.data.DataLoader(Squares(), **arguments)]
torch.manual_seed(3)
loader = penstock.DataLoader(Squares(), **arguments)
assert [batch.tolist() for batch in loader] == expected
print("loads")
"""
_REFUSES = """
try:
    penstock.{asked}
except ImportError as error:
    print(type(error).__name__, error)
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", MODULES)
def test_installed_torch_has_all_names_that_compat_requires(module: str) -> None:
    importlib.import_module(f"penstock.compat.{module}")


def test_missing_names_are_reported_with_version_and_advice() -> None:
    names = ("torch.utils.data._DatasetKind", "torch._C._gone", "torch._no_such.module")
    with pytest.raises(MissingTorchNameError) as caught:
        require("iterators", names, "penstock.DataLoader", "torch.utils.data.DataLoader works.")
    assert caught.value.names == ["torch._C._gone", "torch._no_such.module"]
    assert caught.value.torch_version == torch.__version__
    assert str(caught.value) == (
        f"torch {torch.__version__} lacks torch._C._gone, torch._no_such.module, which "
        f"penstock.DataLoader needs (penstock.compat.iterators); penstock was tested with torch "
        f"2.11 and 2.15. torch.utils.data.DataLoader works. Install one of these versions of "
        f"torch, or a newer penstock"
    )
    assert isinstance(caught.value, UnsupportedError | ImportError)


@pytest.mark.slow
def test_missing_dynamo_name_disables_offload_but_not_the_loader() -> None:
    name = "torch._dynamo.source.TensorPropertySource"
    without = _WITHOUT.format(home="torch._dynamo.source", name=name)
    said = run(without + _LOADS + _REFUSES.format(asked="offload"))
    assert said.startswith("loads\nMissingTorchNameError torch ")
    assert f" lacks {name}, which penstock.offload needs" in said
    assert "penstock.DataLoader works without it" in said


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("home", "name"),
    [
        ("torch.utils.data", "torch.utils.data.dataloader._BaseDataLoaderIter._next_index"),
        ("torch.storage", "torch.storage._StorageBase._new_shared"),
    ],
)
def test_missing_iterator_name_is_reported_by_the_loader(home: str, name: str) -> None:
    said = run(_WITHOUT.format(home=home, name=name) + _REFUSES.format(asked="DataLoader"))
    assert said.startswith("MissingTorchNameError torch ")
    inherited = name.replace("storage._StorageBase", "UntypedStorage")
    assert f" lacks {inherited}, which penstock.DataLoader needs" in said


class Called:
    def __call__(self) -> list[str]:
        return ["own"]


class Inherits(Called):
    pass


def patch(name: str, kind: type = Called) -> Patch:
    def make(former: Any) -> Any:
        return lambda self: [name, *former(self)]

    return Patch(kind, "__call__", make)


def test_undone_patch_leaves_nothing() -> None:
    before = vars(Called)["__call__"]
    ours = patch("ours")
    assert Called()() == ["ours", "own"]
    ours.undo()
    assert vars(Called)["__call__"] is before
    inherited = patch("ours", Inherits)
    inherited.undo()
    assert "__call__" not in vars(Inherits)


def test_patch_of_another_tool_survives_undoing_ours() -> None:
    """The other tool's patch was lost when a watch ended."""
    ours, theirs = patch("ours"), patch("theirs")
    assert Called()() == ["theirs", "ours", "own"]
    ours.undo()
    assert Called()() == ["theirs", "own"]
    theirs.undo()
    assert Called()() == ["own"]


def test_graph_source_is_dropped_with_its_module() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    module = graph_module(torch.nn.Module(), graph)
    name = type(module).forward.__code__.co_filename
    assert any("torch.neg" in line for line in linecache.getlines(name))
    del module, graph  # which refer to each other
    gc.collect()
    assert name not in linecache.cache and linecache.getlines(name) == []


def test_dynamo_settings_leave_nothing_in_the_context() -> None:
    def limit(depth: int = 0) -> list[int]:
        return [config.recompile_limit, *(with_one_more(depth - 1) if depth else [])]

    former = config.recompile_limit
    with_one_more = with_settings(limit, recompile_limit=former + 1)
    assert with_one_more(3) == [former + 1] * 4  # and again within itself
    assert config.recompile_limit == former
    known = len(contextvars.copy_context())
    for _ in range(20):
        assert with_settings(limit, recompile_limit=former + 1)() == [former + 1]
    assert len(contextvars.copy_context()) == known


def test_dynamo_settings_are_restored_after_an_error() -> None:
    former = config.recompile_limit
    with pytest.raises(ZeroDivisionError):
        with_settings(lambda: 1 // 0, recompile_limit=former + 1)()
    assert config.recompile_limit == former
