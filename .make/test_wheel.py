# SPDX-License-Identifier: Apache-2.0
"""Tries wheels of penstock as a user would who has no compiler; then with a compiler, for C++.

usage: test_wheel.py [--torches "2.11 2.15"] [WHEEL...]

The default is the wheels of dist/ for this Python. For each torch, a separate environment gets that
torch and the wheel. With nothing but that environment on PATH, `penstock env`, the quickstart and a
pool run there, and the simulator once the extra is installed from its own wheel; then CMake builds
the first C++ example against the wheel. Finally, pip must reject the wheel on a system with another
C library.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from wheels import tag_of, torch_minors

BUILD = Path("build/wheels/test").absolute()
COMPILERS = ("cc", "gcc", "g++", "clang", "clang++", "cmake", "ninja", "make", "ld")
ROOT = Path(__file__).resolve().parents[1]


def log(text: str) -> None:
    print(f"== {text}", flush=True)


def run(*command: str | Path, folder: Path, environment: dict[str, str]) -> str:
    """Run a command, print its output and return it; exit if the command fails."""
    line = [str(part) for part in command]
    print("$", " ".join(line), flush=True)
    done = subprocess.run(
        line, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=1800,
    )  # fmt: skip
    print(done.stdout, flush=True)
    if done.returncode != 0:
        sys.exit(f"test_wheel.py: {line[0]} failed with status {done.returncode}")
    return done.stdout


def expect(pattern: str, text: str) -> None:
    if not re.search(pattern, text):
        sys.exit(f"test_wheel.py: the output above does not contain {pattern!r}")


def installed(wheel: Path, minor: str) -> Path:
    """The programs of an environment with that torch and the wheel. Its torch, which takes minutes
    to fetch, stays for the next time."""
    place = BUILD / f"{tag_of(sys.executable)}-torch-{minor}"
    if not (place / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
    python = place / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    beside = subprocess.run(
        [sys.executable, ".make/requirements.py", "demo"], cwd=ROOT, text=True, check=True,
        stdout=subprocess.PIPE, env={**os.environ, "TORCH": minor},
    ).stdout.split("\n")  # fmt: skip
    needed = [line for line in beside if line and not line.startswith("setuptools")]
    subprocess.run([*pip, *needed], check=True)
    subprocess.run([python, "-m", "pip", "uninstall", "-yq", "penstock-simulator"], check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", wheel], check=True)
    return place / "bin"


def without_a_compiler(programs: Path, minor: str, folder: Path) -> None:
    environment = {"PATH": str(programs), "HOME": str(folder), "LANG": "C.UTF-8"}
    if there := [name for name in COMPILERS if shutil.which(name, path=str(programs))]:
        sys.exit(f"test_wheel.py: {programs} contains {', '.join(there)}")
    python = programs / "python"
    report = json.loads(
        run(python, "-m", "penstock", "env", "--json", folder=folder, environment=environment)
    )
    expect(
        rf"^yes, .*/lib/torch_{minor.replace('.', '_')}/",
        report["penstock"]["native part loads"][0],
    )
    guide = run(python, "-m", "penstock", "guide", folder=folder, environment=environment)
    expect(r"\nname: penstock\n", guide)
    for library in ("libzmq", "libsodium", "libcrypto"):
        expect(r"/penstock\.libs/", " ".join(report["libraries"][library]))
    # The example draws its photographs from packages, and its loaders have workers.
    quickstart = ROOT / "examples" / "quickstart.py"
    said = run(python, quickstart, "--quick", folder=folder, environment=environment)
    expect("Losses equal to the bit: 3 trainings", said)
    program = ROOT / "tests" / "wheel" / "pool_program.py"
    own = run(python, program, folder=folder, environment=environment)
    command = [programs / "penstock", "run", "--pool-local", "2", program]
    pooled = run(*command, folder=folder, environment=environment)
    expect(r"(?m)^16 batches, iterator pool$", pooled)
    if digest(own) != digest(pooled):
        sys.exit("test_wheel.py: the pool's batches differ from the batches of local workers")


def simulator_is_an_extra(wheel: Path, programs: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    if there := [name for name in names if "simulat" in name or name.endswith(".csv")]:
        sys.exit(f"test_wheel.py: {wheel.name} contains {', '.join(there)}")
    environment = {"PATH": str(programs), "HOME": str(folder), "LANG": "C.UTF-8"}
    command = [programs / "penstock", "simulate", "--first", "20", "--seeds", "1"]
    refused = subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, timeout=600
    )
    expect("needs the package penstock-simulator; install it with", refused.stderr)
    if refused.returncode != 2:
        sys.exit(f"test_wheel.py: penstock simulate exited with {refused.returncode}, not 2")
    extra = ["--no-index", "--find-links", wheel.parent, "penstock[simulate]"]
    run(programs / "python", "-m", "pip", "install", *extra, folder=folder, environment=environment)
    said = run(*command, folder=folder, environment=environment)
    expect("synthetic jobs, since no --jobs was given", said)
    measured = run(*command, "--profiles", "measured", "--split", "1/0/0",
                   folder=folder, environment=environment)  # fmt: skip
    expect("penstock is .* times as fast as proportional", measured)


def digest(text: str) -> str:
    found = re.search(r"(?m)^digest (\S+)$", text)
    return found[1] if found else sys.exit("test_wheel.py: the program printed no digest")


def with_a_compiler(programs: Path, minor: str, folder: Path) -> None:
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    native = f"torch_{minor.replace('.', '_')}"
    place = run(
        programs / "python", "-m", "penstock", "--cmake-dir",
        folder=folder, environment=environment,
    ).strip()  # fmt: skip
    example = ROOT / "examples" / "cpp" / "minimal"
    options = [f"-DCMAKE_PREFIX_PATH={place}", "-DCMAKE_BUILD_TYPE=Release"]
    run("cmake", "-G", "Ninja", "-S", example, "-B", folder / "cpp", *options,
        folder=folder, environment=environment)  # fmt: skip
    run("cmake", "--build", folder / "cpp", folder=folder, environment=environment)
    said = run(folder / "cpp" / "train", folder=folder, environment=environment)
    expect(r"y = (2\.9|3\.0)\d* x \+ (0\.9|1\.0)\d*", said)
    libraries = run("ldd", folder / "cpp" / "train", folder=folder, environment=environment)
    expect(rf"libpenstock\S* => \S*/{native}/", libraries)
    expect(r"libzmq\S* => \S*/penstock\.libs/", libraries)
    # What starts for the plug-ins of such a program.
    worker = Path(place).parents[1] / native / "penstock-worker"
    run(worker, "--version", folder=folder, environment=environment)
    for server in (Path(place).parents[2] / "penstock-server", worker.with_name("penstock-server")):
        libraries = run("ldd", server, folder=folder, environment=environment)
        expect(r"libzmq\S* => \S*/penstock\.libs/", libraries)


def on_another_c_library(wheel: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-index", "--no-deps", "--find-links"]
    command += [wheel.parent, "--only-binary", ":all:", "--platform", "musllinux_1_2_x86_64"]
    done = subprocess.run(
        [*map(str, command), "penstock"], cwd=folder, text=True, capture_output=True
    )
    print("$ pip download --platform musllinux_1_2_x86_64 penstock")
    print(done.stderr)
    if done.returncode == 0 or "No matching distribution found for penstock" not in done.stderr:
        sys.exit("test_wheel.py: pip accepted a glibc wheel for musl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torches", default="", help="minor versions (default: oldest, newest)")
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL")
    args = parser.parse_args()
    tag = tag_of(sys.executable)
    known = torch_minors()
    torches = args.torches.replace(",", " ").split() or [known[0], known[-1]]
    wheels = args.wheels or sorted(Path("dist").glob(f"penstock-*-{tag}-manylinux*.whl"))
    if not wheels:
        sys.exit(f"dist/ has no wheel for {tag}; `make wheels` builds one")
    for wheel in wheels:
        for minor in torches:
            log(f"{wheel.name} with torch {minor}")
            folder = BUILD / f"run-{minor}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            programs = installed(wheel.absolute(), minor)
            without_a_compiler(programs, minor, folder)
            simulator_is_an_extra(wheel.absolute(), programs, folder)
            with_a_compiler(programs, minor, folder)
        on_another_c_library(wheel.absolute(), BUILD)
    log("the wheel works")


if __name__ == "__main__":
    main()
