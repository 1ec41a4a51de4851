#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: test.sh [PYTEST OPTIONS]
# Runs the C++ tests and the Python tests; the second also when the first failed, so that one run tells everything.
set -u
. .make/say.sh
failed=

say "C++ tests"
native=$("$VENV"/bin/python setup.py -q native --show-folder)
ctest --test-dir "$native" --output-on-failure --parallel "$(nproc)" || failed="$failed C++"
case " $* " in
  *" --long "*)
    say "Compiling the fuzz targets"
    "$VENV"/bin/python tests/fuzz/run.py --build-only || [ $? -eq 77 ] || failed="$failed fuzz"  # 77: no clang here
    ;;
esac
say "Python tests"
# Several at a time, since much of a test is waiting for processes to start; one that has nothing left to do takes tests
# of another. The name of the temporary folder is short, as sockets in it have names of at most 107 bytes.
folder=$(mktemp -d /tmp/t.XXXXXX)
"$VENV"/bin/python -m pytest -n 3 --dist worksteal --durations=25 --basetemp="$folder/b" "$@" || failed="$failed Python"
rm -rf "$folder"
case $failed in
  *C++*)
    say "C++ tests that failed, once more"
    grep -h -A 8 -e "Failure$" -e "FAILED" -e "terminate called" "$native/Testing/Temporary/LastTest.log"
    ;;
esac
[ -z "$failed" ] || stop "make test: failed:$failed"
say "all tests passed"
