#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: sanitize.sh address|thread
# Builds the C++ tests with the sanitizer and runs them.
set -eu
. .make/say.sh

folder=build/cmake-$1
case $1 in address) minutes=25 ;; *) minutes=5 ;; esac
say "Compiling the C++ tests with the $1 sanitizer (about $minutes minutes the first time on two cores)"
"$VENV"/bin/python setup.py -q native --sanitize="$1" >&2

# g++ 12's thread sanitizer cannot place its shadow memory when the kernel randomises addresses by more than 28 bits, as
# newer ones do; setarch switches that off for the tests, where it is allowed.
quiet=
if [ "$1" = thread ] && setarch "$(uname -m)" -R true 2>/dev/null; then quiet="setarch $(uname -m) -R"; fi

# libzmq and libtorch are not instrumented: the thread sanitizer sees their malloc, memcpy and free but not the atomics that
# order them, and reported hundreds of races inside libzmq. Calls from such libraries are left out; our own are not.
export TSAN_OPTIONS=ignore_noninstrumented_modules=1 UBSAN_OPTIONS=print_stacktrace=1
$quiet ctest --test-dir "$folder" --output-on-failure
