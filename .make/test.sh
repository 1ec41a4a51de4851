#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: test.sh [PYTEST OPTIONS]
# Runs the C++ tests and the Python tests; the second also when the first failed, so that one run tells everything.
set -u
. .make/say.sh
failed=

say "C++ tests"
ctest --test-dir "build/cmake-$(.venv/bin/python -c 'import sys; print(sys.implementation.cache_tag)')" \
  --output-on-failure || failed="$failed C++"
say "Python tests"
# Two at a time, since much of a test is waiting for processes to start; a file's tests stay together.
.venv/bin/python -m pytest -n 2 --dist loadfile "$@" || failed="$failed Python"
[ -z "$failed" ] || stop "make test: failed:$failed"
say "all tests passed"
