# SPDX-License-Identifier: Apache-2.0
"""Builds the native part with CMake; everything else about the package is in pyproject.toml.

The CMake folder is kept between builds, so that `pip install --no-build-isolation .` after touching
one .cpp compiles one file; where there is no ccache, the few that are compiled with it. `python
setup.py native` runs the same build alone, with its output in sight, and can add the C++ tests, the
benchmarks and a sanitizer; the Makefile uses that.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# One compiler process on torch's headers takes up to 1.6 GB.
COMPILER_GB = 2
# CMake's targets of which a package is made.
PARTS = ("_C", "_pool", "penstock-server", "penstock", "penstock-worker")
SIMULATOR_PARTS = ("_simulator",)


def job_count() -> int:
    """As many compilers as there are cores and memory has room for; MAX_JOBS overrides."""
    if wanted := os.environ.get("MAX_JOBS"):
        return int(wanted)
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory_gb / COMPILER_GB)))


def cmake_folder(sanitize: str = "", lint: bool = False) -> Path:
    # One folder per version of Python and of torch: what CMake found out about one is wrong for
    # another.
    try:
        torch = ".".join(version("torch").split(".")[:2])
    except PackageNotFoundError:
        torch = "none"  # CMake then fails with advice
    tag = f"{sys.implementation.cache_tag}{sys.abiflags}-torch-{torch}"
    name = sanitize or (f"lint-{tag}" if lint else tag)
    return ROOT / "build" / f"cmake-{name}"


def configure(folder: Path, options: dict[str, str]) -> None:
    """Runs CMake when the folder is new, of another place or Python, or lacks an option."""
    wanted = {
        "CMAKE_HOME_DIRECTORY": str(ROOT),
        "Python_EXECUTABLE": sys.executable,
        # From penstock/lib/torch_X_Y to torch, which is installed in the same folder as penstock.
        "PENSTOCK_TORCH_RPATH": "$ORIGIN/../../../torch/lib",
        **options,
    }
    cached: dict[str, str] = {}
    cache = folder / "CMakeCache.txt"
    if cache.exists():
        for line in cache.read_text().splitlines():
            name, _, value = line.partition("=")
            cached[name.partition(":")[0]] = value
    if (folder / "build.ninja").exists() and all(cached.get(k) == v for k, v in wanted.items()):
        return
    fixed = ("CMAKE_HOME_DIRECTORY", "Python_EXECUTABLE")
    if any(cached.get(name, wanted[name]) != wanted[name] for name in fixed):
        cache.unlink()
        shutil.rmtree(folder / "CMakeFiles", ignore_errors=True)
    definitions = [f"-D{k}={v}" for k, v in wanted.items() if k != "CMAKE_HOME_DIRECTORY"]
    run("-G", "Ninja", "-S", str(ROOT), "-B", str(folder), *definitions)


def run(*arguments: str) -> None:
    cmake = shutil.which("cmake")
    if cmake is None or shutil.which("ninja") is None:
        sys.exit(
            "building penstock requires cmake and ninja; try: apt-get install cmake ninja-build"
        )
    try:
        subprocess.run([cmake, *arguments], check=True)
    except subprocess.CalledProcessError as err:
        command = " ".join(arguments)
        sys.exit(f"cmake {command} failed with status {err.returncode}; see its messages above")


def install(folder: Path, target: Path) -> None:
    """Install the result of CMake's build below ``target``/penstock."""
    for component, prefix in (("python", target), ("cpp", target / "penstock")):
        run("--install", str(folder), "--component", component, "--prefix", str(prefix))


class Native(Command):
    """Builds the native part and, when asked, its tests and benchmarks, in build/cmake-*."""

    description = "build the native part with CMake"
    user_options = [
        ("with-tests", None, "also build the C++ tests"),
        ("with-bench", None, "also build the C++ benchmarks"),
        ("configure-only", None, "only write the compile commands for clang-tidy"),
        ("show-folder", None, "only print the folder in which the native part is built"),
        ("install-to=", None, "build only the files of a package, and copy them into it"),
        ("simulator-to=", None, "the same for the package penstock_simulator"),
        ("sanitize=", None, "address or thread: build only the C++ tests, with these sanitizers"),
    ]
    boolean_options = ["with-tests", "with-bench", "configure-only", "show-folder"]

    def initialize_options(self) -> None:
        self.with_tests = False
        self.with_bench = False
        self.configure_only = False
        self.show_folder = False
        self.sanitize = ""
        self.install_to = ""
        self.simulator_to = ""

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        folder = cmake_folder(self.sanitize, lint=self.configure_only)
        if self.show_folder:
            print(folder.relative_to(ROOT))
            return
        options = {}
        if self.with_tests or self.sanitize:
            options["PENSTOCK_BUILD_TESTS"] = "ON"
        if self.with_bench:
            options["PENSTOCK_BUILD_BENCH"] = "ON"
        if self.sanitize:
            options["PENSTOCK_SANITIZE"] = self.sanitize
        if self.configure_only:
            options["PENSTOCK_UNITY"] = "OFF"
        configure(folder, options)
        if self.configure_only:
            # Brings compile_commands.json up to date with added and removed source files.
            run("--build", str(folder), "--target", "build.ninja")
        else:
            parts = PARTS if self.install_to else SIMULATOR_PARTS if self.simulator_to else ()
            targets = ("--target", *parts) if parts else ()
            run("--build", str(folder), "--parallel", str(job_count()), *targets)
        if self.install_to:
            install(folder, Path(self.install_to).resolve())
        if self.simulator_to:
            target = str(Path(self.simulator_to).resolve())
            run("--install", str(folder), "--component", "simulator", "--prefix", target)


def check_torch() -> None:
    """End the build if penstock does not support the installed torch."""
    text = (ROOT / "python" / "penstock" / "_version.py").read_text(encoding="utf-8")
    minors = re.findall(r'"(\d+\.\d+)"', text.partition("TORCH_MINORS =")[2])
    try:
        torch = version("torch")
    except PackageNotFoundError:
        sys.exit(
            f"penstock is built with an installed torch, and {sys.executable} has none; install "
            f"torch {minors[0]} to {minors[-1]} into it, or omit --no-build-isolation: pip then "
            f"fetches the torch named by PENSTOCK_TORCH, else {minors[-1]}"
        )
    if ".".join(torch.split(".")[:2]) not in minors:
        sys.exit(
            f"penstock supports torch {minors[0]} to {minors[-1]}, and {sys.executable} has torch "
            f"{torch}; install a supported torch into it, or use a penstock that supports this "
            "torch"
        )


class BuildExtension(build_ext):
    """Has CMake build the native parts and put them where setuptools wants them: `_pool` and
    penstock-server into the package, and what depends on the torch into lib/torch_X_Y. The
    folders in PENSTOCK_NATIVE_PARTS, separated by `:`, are copied into lib, too: they contain
    builds for other torches (`make wheels`).
    """

    def build_extension(self, ext: Extension) -> None:
        check_torch()
        folder = cmake_folder()
        configure(folder, {})
        run("--build", str(folder), "--parallel", str(job_count()), "--target", *PARTS)
        # Installing, unlike copying, makes the paths to libraries relative.
        package = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        install(folder, package.parent)
        for part in filter(None, os.environ.get("PENSTOCK_NATIVE_PARTS", "").split(":")):
            shutil.copytree(part, package / "lib" / Path(part).name)


class BuildPython(build_py):
    """Starts from an empty folder: setuptools alone would ship modules that are long deleted."""

    def run(self) -> None:
        if not getattr(self, "editable_mode", False):
            shutil.rmtree(Path(self.build_lib) / "penstock", ignore_errors=True)
        super().run()


setup(
    ext_modules=[Extension("penstock._pool", sources=[])],
    cmdclass={"build_ext": BuildExtension, "build_py": BuildPython, "native": Native},
)
