#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: bench.sh [OPTIONS OF bench/loader.py]
# Given options, which choose among its cases, it leaves out the benches after it.
set -eu
. .make/say.sh

say "The C++ parts, one at a time"
"$("$VENV"/bin/python setup.py -q native --show-folder)/bench/micro"
say "The loader for programs in C++ against LibTorch's own"
"$("$VENV"/bin/python setup.py -q native --show-folder)/bench/cpp_loader" 2 --benchmark_min_time=0.3 \
  --benchmark_repetitions=11
say "penstock and torch's DataLoader, side by side"
"$VENV"/bin/python bench/loader.py "$@"
[ $# -eq 0 ] || exit 0
say "How a worker sees whether its dataset has changed"
"$VENV"/bin/python bench/dataset_look.py --out bench/out/dataset-look.jsonl --markdown
say "A tensor in shared memory, given again and again"
"$VENV"/bin/python bench/shared_tensors.py --out bench/out/shared-tensors.jsonl --markdown
"$VENV"/bin/python bench/own_workers.py --out bench/out/own-workers.jsonl --markdown
say "Rows of a table, against two processes without a loader"
"$VENV"/bin/python bench/tabular_rows.py --out bench/out/tabular-rows.jsonl --markdown
say "The first batch of a loader that goes on late in a long epoch"
"$VENV"/bin/python bench/restore.py --out bench/out/restore.jsonl --markdown
say "What the states of a loader cost"
"$VENV"/bin/python bench/states.py --out bench/out/states.jsonl --markdown
say "Mixtures and batches by cost"
"$VENV"/bin/python bench/samplers.py --out bench/out/samplers.jsonl --markdown
say "What batches that a pool keeps cost and save"
"$VENV"/bin/python bench/kept_batches.py --out bench/out/kept-batches.jsonl --markdown
say "A second epoch of photographs from a cache"
"$VENV"/bin/python bench/sample_cache.py --out bench/out/sample-cache.jsonl --markdown
say "The executor of prefixes against eager torch and TorchScript"
"$VENV"/bin/python bench/executor.py --out bench/out/executor.jsonl --markdown
say "The cut against no cut and against the maximal one"
"$VENV"/bin/python bench/cut.py --out bench/out/cut.jsonl --markdown
say "What offload costs when nothing moves"
"$VENV"/bin/python bench/cut.py --overhead --out bench/out/cut-overhead.jsonl --markdown
say "A pool that grows: rates, and what a batch costs trainer and controller"
"$VENV"/bin/python bench/pool_growth.py --out bench/out/pool-growth.jsonl --picture bench/out/pool-growth.svg --markdown
say "The way of a batch from a pool's worker to its trainer"
"$VENV"/bin/python bench/pool_transport.py --out bench/out/pool-transport.jsonl --markdown
say "A pool's worker in several processes"
"$VENV"/bin/python bench/split_worker.py --out bench/out/split-worker.jsonl --markdown
say "Strangers at a pool's ports"
"$VENV"/bin/python bench/strangers.py --out bench/out/strangers.jsonl --markdown
say "Does a pool give back what it takes?"
"$VENV"/bin/python bench/pool_soak.py --out bench/out/pool-soak.jsonl --markdown
say "A job that one worker starves, on a pool that grows by itself"
"$VENV"/bin/python bench/elastic.py --out bench/out/elastic.jsonl --picture bench/out/elastic.svg --markdown
say "The advice of the doctor against a full search"
"$VENV"/bin/python bench/doctor.py --out bench/out/doctor.jsonl --markdown
say "How long a command takes to start"
"$VENV"/bin/python bench/start.py --out bench/out/start.jsonl --markdown
say "The simulator against live jobs on a pool"
"$VENV"/bin/python bench/calibrate.py --out bench/out/calibrate.jsonl --markdown
say "What a worker takes for a batch of each workload"
"$VENV"/bin/python bench/worker_curves.py --out bench/out/worker-curves.jsonl --markdown
