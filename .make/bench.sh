#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: bench.sh [OPTIONS OF bench/loader.py]
set -eu
. .make/say.sh

say "The C++ parts, one at a time"
"build/cmake-$(.venv/bin/python -c 'import sys; print(sys.implementation.cache_tag)')/bench/micro"
say "penstock and torch's DataLoader, side by side"
.venv/bin/python bench/loader.py "$@"
