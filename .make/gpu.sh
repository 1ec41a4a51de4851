#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: gpu.sh test|bench [OPTIONS]
# Builds penstock beside the torch of $PYTHON (python3), and runs the tests or the benches that need a GPU. With
# build/gpu-folder (make gpu-folder) no package registry and no network is used. Without a GPU the tests skip, and say so.
# Programs that train on the GPU write their results to $OUT (bench/out/gpu). Whatever fails, the rest runs, and the exit
# status says so. Bounds of time keep each of the two within 10 minutes on 16 cores, the build included.
set -eu
. .make/say.sh

what=$1
shift
folder=$PWD/build/gpu-folder
VENV=.venv-gpu
export VENV

python=${PYTHON:-python3}
"$python" -c 'import torch' 2>/dev/null ||
  stop "$python has no torch; name a Python that has one with CUDA: make test-gpu PYTHON=/path/to/python"
version=$("$python" -c 'import sys; print(sys.version_info[:2], sys.prefix)')
if [ "$(cat "$VENV/.made-for" 2>/dev/null)" != "$version" ]; then
  say "Making $VENV beside the torch of $python"
  rm -rf "$VENV"
  "$python" -m venv --without-pip "$VENV"
  # Also where that Python is of a virtual environment, whose packages another one does not see.
  "$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' \
    >"$(echo "$VENV"/lib/python3.*/site-packages)/torch-beside.pth"
  if [ -d "$folder/wheels" ]; then index="--no-index --find-links $folder/wheels"; else index=; fi
  "$python" -m pip --python "$VENV/bin/python" install --quiet --disable-pip-version-check $index \
    -r .make/gpu_packages.txt >&2
  echo "$version" >"$VENV/.made-for"
fi
if [ -d "$folder/prefix" ]; then
  export CMAKE_PREFIX_PATH="$folder/prefix" OPENSSL_ROOT_DIR="$folder/prefix" GTEST_ROOT="$folder/prefix"
  # Libraries that the machine has itself, such as the libcrypto of its Python, are used from there.
  known=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p)
  rm -rf "$VENV/lib/beside"
  mkdir -p "$VENV/lib/beside"
  for library in "$folder"/prefix/lib/*.so.*; do
    case $known in *"$(basename "$library") "*) ;; *) cp "$library" "$VENV/lib/beside/" ;; esac
  done
  export LD_LIBRARY_PATH="$PWD/$VENV/lib/beside${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  # What the libraries themselves need, for the linker.
  export LDFLAGS="-Wl,-rpath-link,$folder/prefix/lib ${LDFLAGS:-}"
fi

"$VENV"/bin/python -c '
import torch
there = torch.cuda.is_available()
print("torch", torch.__version__, "on", torch.cuda.get_device_name() if there else "a machine without a GPU")' >&2
has_gpu() { "$VENV"/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; }
results=${OUT:-bench/out/gpu}
failed=

case $what in
  test)
    sh .make/install.sh --with-tests
    tests=$("$VENV"/bin/python setup.py -q native --show-folder)/tests/test_loader
    say "C++ tests of the device"
    "$tests" --gtest_filter='Cuda*:CopyStage*:PinStage*:StageChain*:StagedClient*' || failed="$failed C++"
    "$(dirname "$tests")/test_pool_client" --gtest_filter='StagedPool*' || failed="$failed C++-pool"
    say "The cut of the C++ library"
    "$(dirname "$tests")/test_cut" || failed="$failed C++-cut"
    if command -v compute-sanitizer >/dev/null && has_gpu; then
      say "The same under compute-sanitizer"
      compute-sanitizer --error-exitcode 9 --target-processes application-only \
        "$tests" --gtest_filter='CudaStage*:CudaStream*:CudaWidening*-*Capture*' || failed="$failed compute-sanitizer"
    else
      say "compute-sanitizer is left out: there is none, or no GPU"
    fi
    say "Python tests that are marked cuda"
    temporary=$(mktemp -d /tmp/t.XXXXXX)
    # Files without such a test may import packages that are not there.
    files=$(grep -lE '\bmark\.cuda\b' tests/python/test_*.py)
    "$VENV"/bin/python -m pytest -m cuda -rs -p no:cacheprovider --basetemp="$temporary/b" $files "$@" ||
      failed="$failed Python"
    rm -rf "$temporary"
    if has_gpu; then
      say "Programs that train on the GPU, against torch's loader"
      "$VENV"/bin/python bench/gpu_programs.py checks --minutes 5 --out "$results/checks" || failed="$failed programs"
    else
      say "Programs that train on a GPU are left out: there is none"
    fi
    [ -z "$failed" ] || stop "make test-gpu: failed:$failed"
    say "all tests passed, or skipped for the reasons above"
    ;;
  bench)
    sh .make/install.sh --with-bench
    if [ "$#" -gt 0 ]; then
      "$VENV"/bin/python bench/gpu.py --out bench/out/gpu.jsonl --markdown "$@"
      exit
    fi
    say "Rates of programs that train on the GPU, photographs, the table of bits"
    "$VENV"/bin/python bench/gpu_programs.py measures --minutes 7 --out "$results/measures" || failed="$failed programs"
    say "What device= gives: one round, two numbers of workers (ARGS=... has gpu.py's own options, and nothing else then)"
    timeout 150 "$VENV"/bin/python bench/gpu.py --rounds 1 --steps 60 --workers 2 8 --out "$results/gpu.jsonl" \
      --markdown || failed="$failed gpu.py"
    [ -z "$failed" ] || stop "make bench-gpu: failed:$failed"
    ;;
  *) stop "gpu.sh: there is no '$what'" ;;
esac
