# SPDX-License-Identifier: Apache-2.0
"""The library for C++ programs as installed: found, linked, and rejected where it does not fit; and
its first examples."""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cpp_programs import EXAMPLES, ROOT, build_example, cmake_dir, configure, run
from cut_models import NormalizedResNet
from native_build import build_folder, native_folder
from pool_processes import pool_of

import penstock

PACKAGE = Path(penstock.__file__).parent
TORCH = Path(torch.__file__).parent
LIST = ROOT / "tests" / "cpp" / "api" / "exported_symbols.txt"
FITTED = re.compile(r"y = (2\.9|3\.0)\d* x \+ (0\.9|1\.0)\d*\n")


@pytest.fixture(scope="module")
def minimal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_example("minimal", tmp_path_factory.mktemp("minimal"))


@pytest.mark.slow
def test_minimal_program_trains_and_links_no_python(minimal: Path) -> None:
    done = run(minimal / "train")
    assert FITTED.fullmatch(done.stdout), done.stdout + done.stderr
    libraries = run("ldd", minimal / "train").stdout
    assert "libpenstock.so.0.1" in libraries
    names = [line.split()[0] for line in libraries.splitlines()]
    assert not [name for name in names if "python" in name]


@pytest.mark.slow
def test_cmake_uses_every_option_of_the_tutorial(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorials" / "first-cpp-loop.md").read_text()
    commands = re.findall(r"^\$ (cmake -B .*)$", page, re.MULTILINE)
    assert len(commands) == 1
    program = tmp_path / "program"
    shutil.copytree(EXAMPLES / "minimal", program)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = run("sh", "-c", commands[0], cwd=program, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stderr
    assert "not used by the project" not in done.stderr, done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_cpp_quickstart_losses_match_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES.parent))
    crops = pytest.importorskip("photograph_crops")
    crops.prepare(tmp_path / "photographs", crops.Recipe(train_count=10, held_out_count=1))
    program = build_example("quickstart", tmp_path) / "quickstart"
    train = str(tmp_path / "photographs" / "train")
    in_python = run(sys.executable, EXAMPLES / "quickstart" / "losses.py", train, "2", "2")
    assert len(in_python.stdout.split()) == 10, in_python.stderr
    for workers in ("0", "2"):
        in_cpp = run(program, train, "2", workers)
        assert in_cpp.stdout == in_python.stdout, in_cpp.stderr


@pytest.mark.long
@pytest.mark.slow
def test_program_compiles_with_clang(tmp_path: Path) -> None:
    program = build_example("minimal", tmp_path, "-DCMAKE_CXX_COMPILER=clang++-14") / "train"
    done = run(program)
    assert FITTED.fullmatch(done.stdout), done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_offload_example_trains_bit_for_bit_identically(tmp_path: Path) -> None:
    torch.manual_seed(7)
    torch.jit.script(NormalizedResNet()).save(str(tmp_path / "model.pt"))  # type: ignore[no-untyped-call]
    program = build_example("offload", tmp_path) / "offload"
    done = run(program, tmp_path / "model.pt")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[1-9]\d* batches cut\n40 steps, losses identical", done.stdout), done.stdout
    assert "worker   aten::div" in done.stdout and "trainer  aten::linear" in done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_pool_example_yields_one_stream_from_processes_and_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = build_example("pool", tmp_path)
    for pool in pool_of(tmp_path, monkeypatch):
        pool.start_native_worker(processes=2)
        plugin = build / "libsquares.so"
        of_pool = run(build / "pool", plugin, pool.endpoint, env=pool.environment)
        of_own = run(build / "pool", plugin, env=pool.environment)
        assert of_pool.stdout.startswith("20 batches, sum "), of_pool.stderr
        assert of_pool.stdout == of_own.stdout, of_own.stderr


def exported_symbols(library: Path) -> list[str]:
    lines = run("nm", "-D", "-C", "--defined-only", library).stdout.splitlines()
    names = {re.sub(r"^\S* *[A-Za-z] ", "", line).split("@@")[0] for line in lines}
    return sorted(name for name in names if not name.startswith("PENSTOCK_"))


def test_library_exports_match_the_symbol_list() -> None:
    """After a change on purpose: PENSTOCK_WRITE_SYMBOLS=1 rewrites the list."""
    symbols = exported_symbols(native_folder() / "libpenstock.so.0.1")
    if os.environ.get("PENSTOCK_WRITE_SYMBOLS"):
        LIST.write_text("\n".join(symbols) + "\n")
    assert symbols == LIST.read_text().splitlines()
    assert all(
        re.match(r"((vtable|typeinfo|typeinfo name) for )?penstock::", one) for one in symbols
    )


def _fake_torch(folder: Path, version: str, abi: int) -> Path:
    header = folder / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    names = ("MAJOR", "MINOR", "PATCH")
    lines = [
        f"#define TORCH_VERSION_{name} {part}"
        for name, part in zip(names, version.split("."), strict=True)
    ]
    header.write_text("\n".join(lines))
    settings = folder / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    settings.parent.mkdir(parents=True)
    settings.write_text(f'set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI={abi}")')
    return folder


@pytest.mark.parametrize(
    ("version", "abi", "message"),
    [
        ("2.5.1", 1, r"built for torch 2.1\d, and .* has torch 2.5.1; .*\(2.11 to 2.15 can be\)"),
        (None, 0, "penstock was built with _GLIBCXX_USE_CXX11_ABI=1, and the torch in .* with 0"),
    ],
)
def test_configure_rejects_a_mismatching_torch(
    tmp_path: Path, version: str | None, abi: int, message: str
) -> None:
    version = version or torch.__version__.split("+")[0]
    fake = _fake_torch(tmp_path / "torch", version, abi)
    option = f"-DPenstock_TORCH_ROOT={fake}"
    done = configure(EXAMPLES / "minimal", tmp_path / "build", option)
    assert done.returncode != 0
    assert re.search(message, " ".join(done.stderr.split())), done.stderr


def test_configure_rejects_another_abi_in_compiler_flags(tmp_path: Path) -> None:
    option = "-DCMAKE_CXX_FLAGS=-D_GLIBCXX_USE_CXX11_ABI=0"
    done = configure(EXAMPLES / "minimal", tmp_path / "build", option)
    assert done.returncode != 0
    assert "CMAKE_CXX_FLAGS sets it to 0; leave it out" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_program_rejects_a_mismatching_torch_at_run_time(minimal: Path, tmp_path: Path) -> None:
    source = tmp_path / "other_torch.c"
    source.write_text(
        "unsigned long long aoti_torch_abi_version(void) { return 2ull << 56 | 99ull << 48; }"
    )
    library = tmp_path / "libother_torch.so"
    assert run("cc", "-shared", "-fPIC", source, "-o", library).returncode == 0
    done = run(minimal / "train", env={**os.environ, "LD_PRELOAD": str(library)})
    assert done.returncode != 0
    assert "but torch 2.99 is loaded in this process" in done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_pkg_config_flags_build_a_program(tmp_path: Path) -> None:
    flags = run("pkg-config", "--cflags", "--libs", native_folder() / "penstock.pc")
    assert flags.returncode == 0, flags.stderr
    program = tmp_path / "train"
    source = EXAMPLES / "minimal" / "train.cpp"
    built = run("g++", "-O1", source, "-o", program, *flags.stdout.split())
    assert built.returncode == 0, built.stderr
    assert FITTED.fullmatch(run(program).stdout)


@pytest.mark.long
@pytest.mark.slow
def test_cmake_install_is_found_with_a_separate_torch(tmp_path: Path) -> None:
    done = run(
        "cmake", "--install", build_folder(), "--component", "cpp", "--prefix", tmp_path / "p"
    )
    assert done.returncode == 0, done.stderr
    root = f"-DPenstock_TORCH_ROOT={TORCH}"
    build = build_example("minimal", tmp_path, root, prefix=str(tmp_path / "p"))
    assert FITTED.fullmatch(run(build / "train").stdout)


@pytest.mark.long
@pytest.mark.slow
def test_source_tree_builds_within_another_project_without_cuda(tmp_path: Path) -> None:
    # The whole library is compiled, which takes longer than a test may. Its bound is the bound in
    # run().
    faulthandler.cancel_dump_traceback_later()
    source = tmp_path / "program"
    source.mkdir()
    shutil.copy(EXAMPLES / "minimal" / "train.cpp", source)
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\n"
        "project(train LANGUAGES CXX)\n"
        "include(FetchContent)\n"
        f"FetchContent_Declare(penstock SOURCE_DIR {ROOT})\n"
        "FetchContent_MakeAvailable(penstock)\n"
        "add_executable(train train.cpp)\n"
        "target_link_libraries(train penstock::penstock)\n"
    )
    build = tmp_path / "build"
    done = configure(source, build, "-DPENSTOCK_CUDA=OFF", "-DCMAKE_BUILD_TYPE=Release", prefix="")
    assert done.returncode == 0, done.stderr
    built = run("cmake", "--build", build, "--target", "train")
    assert built.returncode == 0, built.stdout
    assert FITTED.fullmatch(run(build / "train").stdout)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_minimal_example_runs_cleanly_under_sanitizers(tmp_path: Path, sanitizer: str) -> None:
    flags = f"-DCMAKE_CXX_FLAGS=-fsanitize={sanitizer} -g -O1"
    build = build_example("minimal", tmp_path, flags)
    done = run(build / "train")
    assert FITTED.fullmatch(done.stdout), done.stderr


def test_cmake_dir_reports_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.cli import command_line

    refuse: Callable[[Path], bool] = lambda path: False  # noqa: E731
    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(command_line.CommandError, match=r"has no PenstockConfig\.cmake"):
        command_line.cmake_dir()


def test_cmake_dir_is_in_the_package() -> None:
    assert Path(cmake_dir()) == PACKAGE.resolve() / "lib" / "cmake" / "Penstock"
