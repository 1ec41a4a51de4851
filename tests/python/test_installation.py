# SPDX-License-Identifier: Apache-2.0
"""penstock.install(): which callers get which class under torch's name, and how all of it is
undone."""

from __future__ import annotations

import abc
import copy
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch.utils.data
import torch.utils.data.dataloader
import torchdata.stateful_dataloader
from script_runs import running
from stream_oracle import error_of
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import penstock

# In a place that rebinding does not reach.
TORCHS = {"class": torch.utils.data.DataLoader}
TORCHDATAS = {"class": torchdata.stateful_dataloader.StatefulDataLoader}


class EarlyLoader(DataLoader[Any]):
    """Made from torch's class before any installation, and calling it by name."""

    def __init__(self, dataset: Any, label: str, **options: Any) -> None:
        DataLoader.__init__(self, dataset, **options)
        self.label = label

    def __iter__(self) -> Any:
        return DataLoader.__iter__(self)

    def _get_iterator(self) -> Any:
        return DataLoader._get_iterator(self)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PENSTOCK_FALLBACK", "error")
    penstock.install()
    yield
    penstock.uninstall()


@pytest.fixture
def importer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a framework that imports the class from torch, as most do."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def import_framework(name: str) -> ModuleType:
        text = "from torch.utils.data import DataLoader as Loader\nkept_elsewhere = [Loader]\n"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return __import__(name)

    return import_framework


def names_of_the_class() -> list[type]:
    return [DataLoader, torch.utils.data.DataLoader, torch.utils.data.dataloader.DataLoader]


def assert_streams_by_penstock(loader: Any) -> None:
    assert list(loader)
    assert isinstance(loader, penstock.DataLoader)
    assert loader.stats().iterator == "penstock"


def test_install_replaces_every_name_and_uninstall_restores_them() -> None:
    penstock.install()
    try:
        assert all(issubclass(kind, penstock.DataLoader) for kind in names_of_the_class())
    finally:
        penstock.uninstall()
    assert names_of_the_class() == [TORCHS["class"]] * 3


@pytest.mark.usefixtures("installed")
def test_loader_made_by_torch_name_streams_by_penstock() -> None:
    assert_streams_by_penstock(DataLoader([1, 2, 3], num_workers=1))


@pytest.mark.usefixtures("installed")
def test_loader_made_by_torch_name_takes_penstock_options() -> None:
    loader = torch.utils.data.DataLoader([1, 2, 3], num_workers=1, device="cpu")  # type: ignore[call-arg]
    assert loader.device == "cpu"  # type: ignore[attr-defined]
    assert_streams_by_penstock(loader)


def test_frameworks_imported_before_or_after_get_penstock(
    importer: Callable[[str], ModuleType],
) -> None:
    before = importer("imported_before")
    penstock.install()
    try:
        after = importer("imported_after")
        for framework in (before, after):
            assert issubclass(framework.Loader, penstock.DataLoader)
    finally:
        penstock.uninstall()
    assert before.Loader is after.Loader is TORCHS["class"]


@pytest.mark.usefixtures("installed")
def test_reinstall_replaces_names_bound_since(
    importer: Callable[[str], ModuleType],
) -> None:
    framework = importer("imported_meanwhile")
    framework.Loader = TORCHS["class"]  # type: ignore[attr-defined]
    penstock.install()
    assert framework.Loader is DataLoader


def test_uninstall_without_install_changes_nothing() -> None:
    penstock.uninstall()
    assert names_of_the_class() == [TORCHS["class"]] * 3
    assert pickle.loads(pickle.dumps(TORCHS["class"])) is TORCHS["class"]


def test_isinstance_and_issubclass_accept_torch_loaders() -> None:
    plain, early = DataLoader([1]), EarlyLoader([1], "a")
    penstock.install()
    try:
        for loader in (plain, early, penstock.DataLoader([1]), DataLoader([1])):
            assert isinstance(loader, torch.utils.data.DataLoader)
            assert issubclass(type(loader), torch.utils.data.DataLoader)
        assert not isinstance([1], torch.utils.data.DataLoader)
        assert not issubclass(list, torch.utils.data.DataLoader)
        assert not isinstance(plain, penstock.DataLoader)
        assert EarlyLoader in torch.utils.data.DataLoader.__subclasses__()
    finally:
        penstock.uninstall()


@pytest.mark.usefixtures("installed")
def test_patch_of_the_torch_class_does_not_show_on_the_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning patches both in any order, and restores on each the method that it found."""
    own = DataLoader.__setattr__
    monkeypatch.setattr(TORCHS["class"], "__setattr__", lambda *it: object.__setattr__(*it))
    assert DataLoader.__setattr__ is own


@pytest.mark.usefixtures("installed")
def test_later_subclasses_accept_only_their_own_instances() -> None:
    class Late(DataLoader[Any]):
        pass

    class Later(Late):
        pass

    assert isinstance(Later([1]), Late) and issubclass(Later, Late)
    assert not isinstance(DataLoader([1]), Late) and not isinstance(EarlyLoader([1], "a"), Late)
    assert not issubclass(penstock.DataLoader, Late)
    assert_streams_by_penstock(Later([1], num_workers=1))


@pytest.mark.usefixtures("installed")
def test_loader_subclass_may_be_abstract() -> None:
    class Abstract(DataLoader[Any], abc.ABC):
        @abc.abstractmethod
        def label(self) -> str: ...

    class Concrete(Abstract):
        def label(self) -> str:
            return "a"

    assert isinstance(error_of(lambda: Abstract([1])), TypeError)  # type: ignore[abstract]
    assert_streams_by_penstock(Concrete([1], num_workers=1))


@pytest.mark.usefixtures("installed")
def test_subclass_made_before_install_uses_the_torch_iterator() -> None:
    loader = EarlyLoader([1, 2, 3], "a", batch_size=2, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[1, 2], [3]]
    assert not isinstance(loader, penstock.DataLoader)


class Pickled(NamedTuple):
    loader: Any
    kind: Any


@pytest.mark.parametrize("dump", ["before", "while"])
@pytest.mark.parametrize("load", ["before", "while"])
def test_torch_loaders_can_be_pickled_across_install(dump: str, load: str) -> None:
    """Into and out of a process that has installed; the class is found by its name."""
    loader = DataLoader([1, 2, 3], batch_size=2)
    try:
        if dump == "while":
            penstock.install()
        dumped = pickle.dumps(Pickled(loader, type(loader)))
        penstock.uninstall()
        if load == "while":
            penstock.install()
        again = pickle.loads(dumped)
        assert type(again.loader) is again.kind
        assert [batch.tolist() for batch in again.loader] == [[1, 2], [3]]
    finally:
        penstock.uninstall()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copied_penstock_loader_stays_a_penstock_loader(copied: Callable[[Any], Any]) -> None:
    penstock.install()
    loader = DataLoader([1, 2, 3], num_workers=1, device="cpu")  # type: ignore[call-arg]
    penstock.uninstall()
    again = copied(loader)
    assert again.device == "cpu"
    assert_streams_by_penstock(again)


@pytest.mark.usefixtures("installed")
def test_torch_pickle_loads_as_a_penstock_loader() -> None:
    penstock.uninstall()
    dumped = pickle.dumps(DataLoader([1, 2, 3], num_workers=1))
    penstock.install()
    assert_streams_by_penstock(pickle.loads(dumped))


def report_the_class(connection: Any) -> None:
    connection.send(torch.utils.data.DataLoader.__mro__[1] is penstock.DataLoader)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_processes_install_too(method: str) -> None:
    context = multiprocessing.get_context(method)
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=report_the_class, args=(sending,))  # type: ignore[attr-defined]
    process.start()
    sending.close()
    assert receiving.recv() is True
    process.join()
    process.close()
    receiving.close()


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_can_be_spawned_by_an_installing_program(method: str, tmp_path: Path) -> None:
    source = f"""
import penstock
if __name__ == "__main__":
    penstock.install()
from torch.utils.data import DataLoader

class Squares:
    def __len__(self): return 4
    def __getitem__(self, index): return index * index

if __name__ == "__main__":
    loader = DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context="{method}")
    print([batch.tolist() for batch in loader], loader.stats().iterator)
"""
    with running("torch", source, tmp_path) as run:
        assert run.finish() == (0, "[[0, 1], [4, 9]] penstock\n", "")


class EarlyStateful(StatefulDataLoader[Any]):
    """Made from torchdata's class before any installation."""


@pytest.mark.usefixtures("installed")
def test_torchdata_name_is_replaced_and_restored() -> None:
    names = (StatefulDataLoader, torchdata.stateful_dataloader.StatefulDataLoader)
    for kind in names:
        loader: Any = kind([1, 2, 3], num_workers=1, snapshot_every_n_steps=2)
        assert_streams_by_penstock(loader)
        assert isinstance(loader, torch.utils.data.DataLoader)
        assert loader.state_dict()["_iterator_finished"]
    penstock.uninstall()
    assert StatefulDataLoader is TORCHDATAS["class"]
    assert torchdata.stateful_dataloader.StatefulDataLoader is TORCHDATAS["class"]


def test_isinstance_and_issubclass_accept_torchdata_loaders() -> None:
    plain, early = StatefulDataLoader([1]), EarlyStateful([1])
    penstock.install()
    try:
        for loader in (plain, early, StatefulDataLoader([1])):
            assert isinstance(loader, torchdata.stateful_dataloader.StatefulDataLoader)
            assert isinstance(loader, torch.utils.data.DataLoader)
        assert not isinstance(DataLoader([1]), StatefulDataLoader)
        assert not isinstance(plain, penstock.DataLoader)
        assert issubclass(EarlyStateful, StatefulDataLoader)
        assert [batch.tolist() for batch in early] == [[1]], "it goes on with torchdata's iterator"
    finally:
        penstock.uninstall()


@pytest.mark.parametrize("dump", ["before", "while"])
@pytest.mark.parametrize("load", ["before", "while"])
def test_torchdata_loaders_can_be_pickled_across_install(dump: str, load: str) -> None:
    loader = StatefulDataLoader([1, 2, 3], batch_size=2)
    try:
        if dump == "while":
            penstock.install()
        dumped = pickle.dumps(loader)
        penstock.uninstall()
        if load == "while":
            penstock.install()
        again = pickle.loads(dumped)
        assert [batch.tolist() for batch in again] == [[1, 2], [3]]
        assert isinstance(again, StatefulDataLoader)
    finally:
        penstock.uninstall()


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("has_torchdata", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
def test_torchdata_may_be_imported_later_or_be_missing(
    has_torchdata: bool, is_first: bool, tmp_path: Path
) -> None:
    imports = ["import penstock; penstock.install()"]
    if has_torchdata:
        imports.insert(0 if is_first else 1, "from torchdata.stateful_dataloader import *")
    else:
        imports.insert(0, "import sys; sys.modules['torchdata'] = None")
        imports.append("from torch.utils.data import DataLoader as StatefulDataLoader")
    source = (
        "\n".join(imports)
        + """
loader = StatefulDataLoader(
    [1, 2, 3], batch_size=2, num_workers=1, multiprocessing_context="fork"
)
batches = iter(loader)
next(batches)
again = StatefulDataLoader([1, 2, 3], batch_size=2)
again.load_state_dict(loader.state_dict())
print([batch.tolist() for batch in again], isinstance(again, penstock.DataLoader))
"""
    )
    (tmp_path / "program.py").write_text(source)
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[[3]] True\n", "")


def test_installed_seeding_is_the_default_of_loaders_made_by_name() -> None:
    try:
        penstock.install(seeding="batch")
        made = [torch.utils.data.DataLoader([1]), StatefulDataLoader([1])]
        assert [loader.seeding for loader in made] == ["batch", "batch"]
        assert torch.utils.data.DataLoader([1], seeding="worker").seeding == "worker"
        assert torch.utils.data.DataLoader([1], ranks=penstock.Ranks(0, 1)).seeding is None
        assert penstock.DataLoader([1]).seeding is None
        request = multiprocessing.spawn.get_preparation_data("x")["penstock"]
        penstock.install()
        assert torch.utils.data.DataLoader([1]).seeding is None
        pickle.loads(pickle.dumps(request))
        assert torch.utils.data.DataLoader([1]).seeding == "batch"
        with pytest.raises(ValueError, match="seeding must be 'batch', 'sample' or None, got 'x'"):
            penstock.install(seeding="x")  # type: ignore[arg-type]
    finally:
        penstock.uninstall()
    penstock.install()
    try:
        assert torch.utils.data.DataLoader([1]).seeding is None
    finally:
        penstock.uninstall()
