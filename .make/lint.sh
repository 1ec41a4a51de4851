#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Layout and lint of the C++ and the Python, the types of the Python, and the English of documents and code. Runs every
# check, then fails if one did.
set -u
. .make/say.sh
failed=

check() {
  say "$1"
  shift
  "$@" || failed=yes
}

cpp_files=$(find csrc tests bench -name '*.h' -o -name '*.cpp' -o -name '*.cu')
python_files="setup.py .make python simulator tests docs/site"
for folder in bench examples; do
  [ ! -d "$folder" ] || python_files="$python_files $folder"
done

check "clang-format" clang-format-14 --dry-run -Werror $cpp_files
check "ruff" "$VENV"/bin/ruff check $python_files
check "ruff format" "$VENV"/bin/ruff format --check $python_files
check "mypy --strict" "$VENV"/bin/mypy --strict python simulator/penstock_simulator
check "English of documents and code" "$VENV"/bin/python .make/prose.py
check "clang-tidy (the first time minutes, then only what changed)" "$VENV"/bin/python .make/tidy.py
[ -z "$failed" ] || stop "make lint: something above wants a change"
say "clean"
