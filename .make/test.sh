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
.venv/bin/python -m pytest "$@" || failed="$failed Python"
[ -z "$failed" ] || stop "make test: failed:$failed"
say "all tests passed"
