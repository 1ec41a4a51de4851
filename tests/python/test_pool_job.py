# SPDX-License-Identifier: Apache-2.0
"""Jobs are packed by a program and run in another process, which has neither the program, nor its
folder, nor its path.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sample_datasets import Computed, number
from torch.utils.data import TensorDataset, _DatasetKind, default_collate

import penstock
from penstock.pool.job_code import extract_code, pack_code, put_first_in_path
from penstock.pool.job_versions import Versions, reason_to_refuse
from penstock.pool.pool_job import Job, JobRefused, PackedJob, job_id, pack_job, unpack_job
from penstock.worker.fetching import FetchSpec

pytestmark = pytest.mark.slow

SECONDS_MAX = 120
PACKAGE_FOLDER = str(Path(penstock.__file__).resolve().parent.parent)

PROGRAM = """
import enum, json, sys
from pathlib import Path
sys.path.insert(0, {package_folder!r})
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, _DatasetKind, default_collate
from penstock.worker.fetching import FetchSpec
from penstock.pool.job_code import pack_code
from penstock.pool.pool_job import Job, job_id, pack_job
import mine.scaling
from single import offset_of

SCALE = 3

class Kind(enum.Enum):
    ODD = 1
    EVEN = 2

class Base(Dataset):
    def __len__(self):
        return 4

class Scaled(Base):
    kind = Kind.EVEN

    def __getitem__(self, index):
        super().__len__()
        return torch.tensor([index * SCALE, np.int64(index), self.kind.value])

class Counted(IterableDataset):
    def __iter__(self):
        return iter(range(10))

class Drawing(Base):
    def __init__(self):
        self.generator = torch.Generator()
        self.generator.manual_seed(7)

    def __getitem__(self, index):
        return torch.rand(2, generator=self.generator)

def closing_over(factor):
    class Local(Base):
        def __getitem__(self, index):
            return torch.tensor(index * factor)
    return Local()

class FromModules(Base):
    def __getitem__(self, index):
        from mine.lazily import added
        return torch.tensor(added(mine.scaling.scaled(index)) + offset_of(index))

here = Path(sys.argv[1])
np.arange(8, dtype=np.float32).tofile(here / "mapped.bin")

class Mapped(Base):
    def __init__(self):
        self.rows = np.memmap(here / "mapped.bin", np.float32, "r", shape=(4, 2))

    def __getitem__(self, index):
        return torch.from_numpy(np.array(self.rows[index]))

rows = torch.arange(8.0).reshape(4, 2)
datasets = {{
    "class": (Scaled(), default_collate),
    "lambda": (Scaled(), lambda samples: [int(sample[0]) for sample in samples]),
    "closure": (closing_over(5), default_collate),
    "tensors": (TensorDataset(rows, rows[:, 0].long()), default_collate),
    "generator": (Drawing(), default_collate),
    "mapped": (Mapped(), default_collate),
    "modules": (FromModules(), default_collate),
}}
packed = {{}}
for name, (dataset, collate) in datasets.items():
    fetch = FetchSpec(_DatasetKind.Map, dataset, True, collate, False, 1)
    code_paths = [here / "code", here / "single.py"] if name == "modules" else []
    job = Job(fetch, None, 1, False, name)
    packed[name] = pack_job(job, pack_code(code_paths))
    assert job_id(job, pack_code(code_paths)) == packed[name].id
fetch = FetchSpec(_DatasetKind.Iterable, Counted(), True, default_collate, False, 1)
packed["iterable"] = pack_job(Job(fetch, None, 3, True, "iterable"), [])
for job in packed.values():
    for key, blob in job.blobs.items():
        (here / "blobs" / key.hex()).write_bytes(blob)
print(json.dumps({{name: job.id.hex() for name, job in packed.items()}}))
"""

# Reads every job named on its input, and prints its batch of samples 0 and 3, or the reason for its
# failure.
WORKER = """
import json, sys
from pathlib import Path
sys.path.insert(0, {package_folder!r})
from penstock.pool.pool_job import JobRefused, unpack_job

blobs, code_root = Path(sys.argv[1]), sys.argv[2]
get_blob = lambda key: (blobs / key.hex()).read_bytes()
told = {{}}
for job_id in sys.argv[3:]:
    try:
        job = unpack_job((blobs / job_id).read_bytes(), get_blob, code_root)
    except JobRefused as refused:
        told[job_id] = str(refused)
        continue
    fetcher = job.fetch.make_fetcher(job.fetch.dataset, None)
    batch = fetcher.fetch([0, 3])
    as_list = lambda part: part.tolist() if hasattr(part, "tolist") else part
    batch = as_list(batch) if not isinstance(batch, list) else [as_list(part) for part in batch]
    told[job_id] = [job.shard_count, job.trust_workers, batch]
print(json.dumps(told))
"""


class Ran(NamedTuple):
    folder: Path
    ids: dict[str, str]
    told: dict[str, Any]  # by the worker, by name


def run_alone(program: str, cwd: Path, *arguments: str, **environment: str) -> Any:
    """The output of a program in a separate process, which has no access to this folder."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run_worker(folder: Path, ids: dict[str, str], cwd: Path) -> dict[str, Any]:
    program = WORKER.format(package_folder=PACKAGE_FOLDER)
    arguments = (str(folder / "blobs"), str(cwd / "code"), *ids.values())
    told = run_alone(program, cwd, *arguments)
    return {name: told[job_id] for name, job_id in ids.items()}


@pytest.fixture(scope="module")
def program_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    (folder / "blobs").mkdir()
    (folder / "code" / "mine").mkdir(parents=True)
    (folder / "code" / "mine" / "__init__.py").touch()
    (folder / "code" / "mine" / "scaling.py").write_text("def scaled(x):\n    return 10 * x\n")
    (folder / "code" / "mine" / "lazily.py").write_text("def added(x):\n    return x + 1\n")
    (folder / "single.py").write_text("def offset_of(x):\n    return 100 * x\n")
    (folder / "train.py").write_text(PROGRAM.format(package_folder=PACKAGE_FOLDER))
    return folder


def run_program(folder: Path) -> Any:
    done = subprocess.run(
        [sys.executable, str(folder / "train.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": str(folder / "code")},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def ran(program_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    ids = run_program(program_folder)
    # Mapped data is sent by value.
    (program_folder / "mapped.bin").unlink()
    told = run_worker(program_folder, ids, tmp_path_factory.mktemp("worker"))
    return Ran(program_folder, ids, told)


@pytest.mark.long("class-batch0")
@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("class", [[0, 0, 2], [9, 3, 2]]),
        ("lambda", [0, 9]),
        ("closure", [0, 15]),
        ("tensors", [[[0.0, 1.0], [6.0, 7.0]], [0, 6]]),
        ("mapped", [[0.0, 1.0], [6.0, 7.0]]),
        ("modules", [1, 331]),
    ],
)
def test_packed_job_runs_in_another_process(ran: Ran, name: str, batch: Any) -> None:
    assert ran.told[name] == [1, False, batch]


def test_packed_generator_continues_from_its_state(ran: Ran) -> None:
    generator = torch.Generator()
    generator.manual_seed(7)
    expected = [torch.rand(2, generator=generator).tolist() for _ in range(2)]
    assert ran.told["generator"] == [1, False, expected]


def test_packed_job_keeps_loader_options(ran: Ran) -> None:
    assert ran.told["iterable"] == [3, True, [0, 1]]


def test_another_run_of_the_program_gives_the_same_ids(ran: Ran) -> None:
    assert run_program(ran.folder) == ran.ids


@pytest.mark.long
def test_missing_module_error_suggests_code_paths(program_folder: Path, tmp_path: Path) -> None:
    text = (program_folder / "train.py").read_text()
    changed = text.replace('[here / "code", here / "single.py"]', '[here / "single.py"]')
    assert changed != text
    (program_folder / "without.py").write_text(changed)
    done = subprocess.run(
        [sys.executable, str(program_folder / "without.py"), str(program_folder)],
        env={**os.environ, "PYTHONPATH": str(program_folder / "code")},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 0, done.stderr
    ids = {"modules": json.loads(done.stdout)["modules"]}
    told = run_worker(program_folder, ids, tmp_path)["modules"]
    assert told.startswith("the job 'modules' cannot run here: its dataset needs the module 'mine'")
    assert f"pass pool=Pool(..., code_paths=[{str(program_folder / 'code')!r}])" in told


def spec(dataset: Any, collate_fn: Callable[[Any], Any] = default_collate) -> FetchSpec:
    return FetchSpec(_DatasetKind.Map, dataset, True, collate_fn, False, 1)


def pack(dataset: Any, collate_fn: Callable[[Any], Any] = default_collate) -> PackedJob:
    return pack_job(Job(spec(dataset, collate_fn), None, 1, False, "train.py"), [])


def no_blobs(key: bytes) -> bytes:
    raise AssertionError("the job has no code")


def unpack(packed: PackedJob, folder: Path) -> Any:
    return unpack_job(packed.blobs[packed.id], no_blobs, str(folder)).fetch.dataset


def test_job_id_is_hash_of_its_content() -> None:
    packed = pack(Computed(3, number))
    assert packed.id == hashlib.sha256(packed.blobs[packed.id]).digest()
    assert pack(Computed(3, number)).id == packed.id
    assert pack(Computed(4, number)).id != packed.id


def test_job_id_is_computed_without_a_copy() -> None:
    """Each epoch started with copies of the whole dataset in memory."""
    rows = torch.rand(4 << 20)
    words = [f"images/{number:07d}.jpg" for number in range(10_000)]
    job = Job(spec([rows, words]), None, 1, False, "train.py")
    packed_id = pack_job(job, []).id
    tracemalloc.start()
    try:
        assert job_id(job, []) == packed_id
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < rows.nbytes // 4
    rows[7] += 1  # which only the bytes reveal
    assert job_id(job, []) != packed_id


def test_shared_tensor_memory_is_packed_once(tmp_path: Path) -> None:
    rows = torch.rand(1000, 100)
    packed = pack(TensorDataset(rows, rows[:, :10], rows.to_sparse(), torch.empty(1000, 0)))
    sparse_bytes = rows.numel() * (4 + 2 * 8)
    assert len(packed.blobs[packed.id]) < rows.nbytes + sparse_bytes + 10_000
    whole, part, sparse, empty = unpack(packed, tmp_path).tensors
    assert torch.equal(whole, rows)
    assert torch.equal(sparse.to_dense(), rows)
    assert empty.shape == (1000, 0)
    whole[0, 0] = 5
    assert part[0, 0] == 5


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
        torch.rand(4, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.rand(3)),
        torch.rand(3).bfloat16(),
        torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8),
        torch.rand(3).share_memory_(),
    ],
    ids=["strides", "conj", "parameter", "bfloat16", "quantized", "shared"],
)
def test_tensor_kinds_survive_packing(tmp_path: Path, tensor: torch.Tensor) -> None:
    got = unpack(pack([tensor]), tmp_path)[0]
    assert type(got) is type(tensor)
    assert got.dtype == tensor.dtype
    assert got.stride() == tensor.stride()
    assert got.requires_grad == tensor.requires_grad
    assert torch.equal(got, tensor)


def test_memory_mapped_array_is_packed_by_value(tmp_path: Path) -> None:
    rows = np.memmap(tmp_path / "rows", np.float64, "w+", shape=(1000,))
    rows[:] = np.arange(1000)
    packed = pack([rows])
    assert rows.nbytes < len(packed.blobs[packed.id]) < rows.nbytes + 5000
    got = unpack(packed, tmp_path / "code")[0]
    assert np.array_equal(got, np.arange(1000))
    got[0] = 7  # private memory
    assert rows[0] == 0


class Holding:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def text_file(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "text").write_text("text")
    with open(tmp_path / "text") as file:
        yield file


def test_open_file_error_names_its_path_in_dataset(text_file: Any) -> None:
    dataset = Holding(rows=[1, 2], index=Holding(source={"raw": [text_file]}))
    with pytest.raises(pickle.PicklingError) as caught:
        pack(dataset)
    assert "the loader of a test_pool_job.Holding cannot be sent" in str(caught.value)
    assert "dataset.index.source['raw'][0], of type _io.TextIOWrapper" in str(caught.value)
    assert "cannot pickle an open file" in str(caught.value)
    assert "__getstate__" in str(caught.value)


def test_error_names_unpicklable_closure_variable_of_collate_fn() -> None:
    lock = threading.Lock()

    def collate(samples: Any) -> Any:
        with lock:
            return samples

    with pytest.raises(pickle.PicklingError, match="collate_fn -> the variable lock, of type _thr"):
        pack([1], collate)


def test_error_does_not_blame_back_references() -> None:
    dataset = Holding()
    dataset.child = Holding(parent=dataset)
    dataset.lock = threading.Lock()
    with pytest.raises(pickle.PicklingError, match=r"dataset\.lock, of type _thread\.lock"):
        pack(dataset)


def test_pickling_error_includes_exception_of_reduce() -> None:
    class Refusing:
        def __reduce__(self) -> Any:
            raise ValueError("not today")

    with pytest.raises(pickle.PicklingError, match="dataset.part.*ValueError: not today"):
        pack(Holding(part=Refusing()))


@pytest.mark.cuda
def test_cuda_tensor_in_job_is_rejected() -> None:
    with pytest.raises(pickle.PicklingError, match="dataset.*a tensor on cuda:0"):
        pack(Holding(rows=torch.zeros(2, device="cuda")))


def here(**packages: str) -> Versions:
    return Versions("3.11.2", "2.11.0+cpu", "0.1.0", packages)


@pytest.mark.parametrize(
    ("made_with", "reason"),
    [
        (Versions("3.12.1", "2.11.0", "0.1.0", {}), "has Python 3.12.1, but this worker (host:7)"),
        (Versions("3.11.9", "2.10.1", "0.1.0", {}), "has torch 2.11.0+cpu; install the same"),
        (Versions("3.11.9", "2.11.1", "0.2.0", {}), "penstock 0.2.0"),
        (here(pillow="11.0"), "but this worker (host:7) has no pillow; install it"),
        (here(numpy="1.26.4"), "has numpy 1.26.4, but this worker (host:7) has numpy 2.4.6"),
        (here(timm="0.9.1"), "timm 0.10.0; install the same version"),
    ],
)
def test_version_mismatch_error_names_both_versions(made_with: Versions, reason: str) -> None:
    installed = {"numpy": "2.4.6", "timm": "0.10.0"}.get
    told = reason_to_refuse(made_with, here(), installed, "host:7")
    assert told is not None
    assert reason in told


def test_compatible_version_differences_are_accepted() -> None:
    made_with = Versions("3.11.9", "2.11.1+cu130", "0.1.0", {"numpy": "2.0.1", "timm": "0.10.3"})
    installed = {"numpy": "2.4.6", "timm": "0.10.0"}.get
    assert reason_to_refuse(made_with, here(), installed, "host:7") is None


def header_of(blob: bytes) -> tuple[dict[str, Any], bytes]:
    (byte_count,) = struct.unpack("<Q", blob[-8:])
    return json.loads(blob[-8 - byte_count : -8]), blob[: -8 - byte_count]


def with_header(header: dict[str, Any], pickled: bytes) -> bytes:
    text = json.dumps(header).encode()
    return pickled + text + struct.pack("<Q", len(text))


def test_job_header_lists_packages_and_missing_modules() -> None:
    def collate(samples: Any) -> Any:
        return np.stack(samples)

    packed = pack(torch.zeros(2), collate)
    header, _ = header_of(packed.blobs[packed.id])
    assert set(header["made_with"]["packages"]) == {"cloudpickle", "numpy"}
    assert header["modules"] == {}
    packed = pack(Computed(3, number))
    header, _ = header_of(packed.blobs[packed.id])
    folder = Path(__file__).parents[1] / "contract"
    assert header["modules"] == {"sample_datasets": str(folder)}
    # Data that is sent need not exist at the worker.
    sent = pack_job(Job(spec(Computed(3, number)), None, 1, False, "train.py"), pack_code([folder]))
    header, _ = header_of(sent.blobs[sent.id])
    assert header["modules"] == {}
    assert [each["name"] for each in header["code"]] == ["contract"]


class Touching:
    """Unpickling this leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_job_of_other_version_is_rejected_before_unpickling(tmp_path: Path) -> None:
    packed = pack([Touching(tmp_path / "touched")])
    header, rest = header_of(packed.blobs[packed.id])
    header["made_with"]["torch"] = "2.10.1"
    with pytest.raises(JobRefused) as caught:
        unpack_job(with_header(header, rest), no_blobs, str(tmp_path / "code"))
    assert "the job 'train.py' cannot run here: the trainer has torch 2.10.1" in str(caught.value)
    assert f":{os.getpid()}) has torch {torch.__version__}" in str(caught.value)
    assert not (tmp_path / "touched").exists()
    unpack(packed, tmp_path / "code")
    assert (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"name": 3},
        {"code": [{"name": "x", "id": "../../x"}]},
        {"code": [{"name": "x"}]},
        {"code": ["x"]},
        {"shard_count": "1"},
        {"modules": {"x": 1}},
        {"made_with": {}},
        {"unknown": 1},
    ],
    ids=str,
)
def test_malformed_job_header_is_rejected_before_unpickling(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    packed = pack([Touching(tmp_path / "touched")])
    header, rest = header_of(packed.blobs[packed.id])
    with pytest.raises(JobRefused, match="cannot read the job that it received"):
        unpack_job(with_header({**header, **change}, rest), no_blobs, str(tmp_path / "code"))
    assert not (tmp_path / "touched").exists()


def test_truncated_job_is_rejected(tmp_path: Path) -> None:
    packed = pack([1])
    blob = packed.blobs[packed.id]
    for byte_count in range(len(blob)):
        with pytest.raises(JobRefused):
            unpack_job(blob[:byte_count], no_blobs, str(tmp_path))
    with pytest.raises(JobRefused):
        unpack_job(b"\xff" * 64, no_blobs, str(tmp_path))


def test_missing_name_in_worker_module_suggests_code_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = pack(Computed(3, number))
    monkeypatch.delattr("sample_datasets.number")
    with pytest.raises(JobRefused, match="another version of .*number.*code_paths"):
        unpack(packed, tmp_path)


# The code folders.


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_code_zip_is_independent_of_folder_and_times(tmp_path: Path) -> None:
    files = {"b/x.py": "x = 1", "a.py": "y = 2"}
    first = write_tree(tmp_path / "first" / "code", files)
    second = write_tree(tmp_path / "second" / "code", dict(reversed(files.items())))
    os.utime(second / "a.py", (1, 1))
    assert pack_code([first])[0].id == pack_code([second])[0].id
    assert pack_code([first, first, str(first) + "/"]) == pack_code([first])


def test_invalid_code_path_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "x.txt").touch()
    for path in (tmp_path / "x.txt", tmp_path / "none"):
        with pytest.raises(ValueError, match="code_paths must name folders or .py files, got"):
            pack_code([path])
    with pytest.raises(TypeError, match="code_paths must be a sequence of folders"):
        pack_code(str(tmp_path))


@pytest.mark.parametrize("name", ["/x.py", "../x.py", "a/../../x.py", "a//x.py", "a\\x.py", "d/"])
def test_zip_with_escaping_path_is_rejected(tmp_path: Path, name: str) -> None:
    import io
    import zipfile

    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("fine.py", "")
        archive.writestr(name, "")
    with pytest.raises(penstock.errors.UnsupportedError, match="named"):
        extract_code(data.getvalue(), "0" * 64, str(tmp_path / "root" / "code"))
    assert [path.name for path in (tmp_path / "root").rglob("*")] == ["code"]


def test_truncated_zips_are_rejected(tmp_path: Path) -> None:
    (packed,) = pack_code([write_tree(tmp_path / "tree", {"a.py": "x = 1\n" * 100})])
    for byte_count in range(0, len(packed.data), 7):
        with pytest.raises(penstock.errors.UnsupportedError):
            extract_code(packed.data[:byte_count], "0" * 64, str(tmp_path / "code"))
    assert list((tmp_path / "code").iterdir()) == []


def test_world_writable_code_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code").chmod(0o777)
    (packed,) = pack_code([write_tree(tmp_path / "tree", {"a.py": ""})])
    with pytest.raises(
        penstock.errors.UnsupportedError,
        match="must belong to this user .* writable by no other user",
    ):
        extract_code(packed.data, "0" * 64, str(tmp_path / "code"))


@pytest.fixture
def restored_path_and_modules() -> Iterator[None]:
    path, modules = list(sys.path), dict(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]
    sys.modules.update(modules)


@pytest.mark.usefixtures("restored_path_and_modules")
def test_each_job_imports_its_own_modules(tmp_path: Path) -> None:
    def use(place: str) -> Any:
        tree = write_tree(tmp_path / place, {"of_the_job/part.py": f"place = {place!r}"})
        (packed,) = pack_code([tree])
        code_id = hashlib.sha256(packed.data).hexdigest()
        code_root = str(tmp_path / "code")
        put_first_in_path([extract_code(packed.data, code_id, code_root)], code_root)
        import of_the_job.part

        return of_the_job.part

    first = use("first")
    assert first.place == "first"
    assert use("first") is first
    second = use("second")
    assert second.place == "second"
    assert use("first") is not first
    put_first_in_path([], str(tmp_path / "code"))
    with pytest.raises(ModuleNotFoundError):
        import of_the_job  # noqa: F401
    assert os.stat(tmp_path / "code").st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("restored_path_and_modules")
def test_nested_namespace_packages_of_a_job_are_unloaded(tmp_path: Path) -> None:
    """The worker raised KeyError when it unloaded the parent first."""
    code_root = str(tmp_path / "code")
    (packed,) = pack_code([write_tree(tmp_path / "job", {"spread/inner/part.py": "place = 1"})])
    put_first_in_path([extract_code(packed.data, "2" * 64, code_root)], code_root)
    import spread.inner.part

    assert spread.__file__ is None and spread.inner.__file__ is None
    put_first_in_path([], code_root)
    assert [name for name in sys.modules if name.partition(".")[0] == "spread"] == []


@pytest.mark.usefixtures("restored_path_and_modules")
def test_job_code_takes_precedence_over_worker_modules(
    tmp_path: Path,
) -> None:
    of_the_worker = write_tree(tmp_path / "worker", {"of_both.py": "place = 'worker'"})
    sys.path.insert(0, str(of_the_worker))
    import of_both

    assert of_both.place == "worker"
    (packed,) = pack_code([write_tree(tmp_path / "job", {"of_both.py": "place = 'job'"})])
    code_root = str(tmp_path / "code")
    put_first_in_path([extract_code(packed.data, "1" * 64, code_root)], code_root)
    import of_both

    assert of_both.place == "job"
