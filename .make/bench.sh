#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: bench.sh [OPTIONS OF bench/loader.py]
# Given options, which choose among its cases, it leaves out the benches after it.
set -eu
. .make/say.sh

say "The C++ parts, one at a time"
"build/cmake-$(.venv/bin/python -c 'import sys; print(sys.implementation.cache_tag)')/bench/micro"
say "penstock and torch's DataLoader, side by side"
.venv/bin/python bench/loader.py "$@"
[ $# -eq 0 ] || exit 0
say "How a worker sees whether its dataset has changed"
.venv/bin/python bench/dataset_look.py --out bench/out/dataset-look.jsonl --markdown
say "The executor of prefixes against eager torch and TorchScript"
.venv/bin/python bench/executor.py --out bench/out/executor.jsonl --markdown
say "The cut against no cut and against the maximal one"
.venv/bin/python bench/cut.py --out bench/out/cut.jsonl --markdown
say "What offload costs when nothing moves"
.venv/bin/python bench/cut.py --overhead --out bench/out/cut-overhead.jsonl --markdown
say "A pool that grows: rates, and what a batch costs trainer and controller"
.venv/bin/python bench/pool_growth.py --out bench/out/pool-growth.jsonl --picture bench/out/pool-growth.svg --markdown
say "The way of a batch from a pool's worker to its trainer"
.venv/bin/python bench/pool_transport.py --out bench/out/pool-transport.jsonl --markdown
say "Does a pool give back what it takes?"
.venv/bin/python bench/pool_soak.py --out bench/out/pool-soak.jsonl --markdown
say "How long a command takes to start"
.venv/bin/python bench/start.py --out bench/out/start.jsonl --markdown
