# SPDX-License-Identifier: Apache-2.0
# The commands of every day. Each does the set-up that it needs, once; the steps are small scripts in .make/.

SHELL := /bin/sh
export PYTHON
# The torch to install and to build for. Each has a virtual environment and a build folder of its own.
TORCH ?= 2.15
export TORCH
export VENV := .venv$(if $(filter-out 2.15,$(TORCH)),-torch-$(TORCH))
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Options for what a command runs: make demo ARGS="--json result.json", make test ARGS="-k prefetch"
ARGS ?=

.PHONY: help demo test test-contract test-all wheels test-wheel docs lint bench comparison fuzz chaos test-sim test-asan test-tsan gpu-folder test-gpu bench-gpu clean

help:
	@echo "penstock"
	@echo
	@echo "  make demo       train on real photographs three ways; ARGS=\"--json FILE\" keeps the result"
	@echo "  make test       the tests, C++ and Python; ARGS goes to pytest"
	@echo "  make test-contract  of these, what the loader, the cut and the pool promise: for the torches between oldest and newest"
	@echo "  make test-all   the same with the longest (those marked long), what torch's own loader does in them, and the C++ benchmarks"
	@echo "  make wheels     a wheel for each of PYTHONS=\"python3.11 python3.12\", in dist; TORCHES=\"2.11 2.15\" for these alone"
	@echo "  make test-wheel a wheel of dist in environments without a compiler, then with one for C++; TORCHES as above"
	@echo "  make docs       the documentation as a site, with the references of Python and C++, in build/docs/site"
	@echo "  make lint       clang-format, clang-tidy, ruff, mypy, and the English of documents and code"
	@echo "  make bench      every figure quoted anywhere; ARGS goes to bench/loader.py and leaves out bench/cut.py"
	@echo "  make comparison  other loaders on the same promises and workloads; ARGS=\"--only rates\" or ARGS=\"--systems SYSTEM\" does a part"
	@echo "  make fuzz       every parser of a peer's bytes against libFuzzer, FUZZ_SECONDS=60 each; ARGS names some of them"
	@echo "  make chaos      live pools whose processes are killed, stopped, cut off and starved; ARGS=\"--only SCENARIO\" does one"
	@echo "  make test-sim   200,000 simulated pools of workers that crash, lose processes, hang, stall and are cut off; ARGS=\"--replay SEED\" runs one"
	@echo "  make test-asan  the C++ tests with address and undefined-behaviour sanitizers"
	@echo "  make test-tsan  the C++ tests with the thread sanitizer"
	@echo "  make test-gpu   the tests that need a GPU, and programs that train on it, against torch's loader; PYTHON=... has torch"
	@echo "  make bench-gpu  the rates of these programs, photographs into a ResNet-50, what device= gives; results in OUT=..."
	@echo "  make gpu-folder what both need on a machine without a package registry, in build/gpu-folder"
	@echo "  make clean      remove what was built (.venv stays; remove it by hand to start over)"
	@echo
	@echo "On Debian and Ubuntu each installs what is missing first: Debian packages (as root or with sudo),"
	@echo "PyTorch into .venv, and penstock itself. PYTHON=... names the Python to make .venv with; TORCH=2.11 takes that"
	@echo "torch in place of 2.15, in .venv-torch-2.11, so that both can be kept."

demo:
	@python=$$(sh .make/system.sh build) && sh .make/packages.sh "$$python" demo
	@sh .make/install.sh
	@$(VENV)/bin/python examples/quickstart.py $(ARGS)

test:
	@python=$$(sh .make/system.sh build test) && sh .make/packages.sh "$$python" test
	@sh .make/install.sh --with-tests $(ALSO_BUILT)
	@sh .make/test.sh $(ARGS)

# What the loader, the cut and the pool promise, with the C++ tests.
CONTRACTS := tests/contract $(addprefix tests/python/test_,compat.py dataloader.py start.py offload*.py lowering.py \
  lazy*.py compiled_prefix.py pool*.py own_workers.py loader_state.py seeding.py worker_failover.py cpp_package.py \
  cpp_library.py cpp_workers.py)

test-contract:
	@$(MAKE) --no-print-directory test ARGS="$(CONTRACTS) $(ARGS)"

test-all:
	@python=$$(sh .make/system.sh build test bench model docs clang browser) && sh .make/packages.sh "$$python" test lint cluster docs
	@$(MAKE) --no-print-directory test ALSO_BUILT=--with-bench ARGS="--long $(ARGS)"

wheels:
	@python=$$(sh .make/system.sh build) && "$$python" .make/wheels.py --torches "$(TORCHES)" $(or $(PYTHONS),"$$python")

test-wheel:
	@python=$$(sh .make/system.sh build) && "$$python" .make/test_wheel.py --torches "$(TORCHES)" $(WHEEL)

docs:
	@python=$$(sh .make/system.sh build docs) && sh .make/packages.sh "$$python" docs
	@sh .make/install.sh
	@$(VENV)/bin/python docs/site/build_site.py $(ARGS)

lint:
	@python=$$(sh .make/system.sh build lint) && sh .make/packages.sh "$$python" lint
	@$(VENV)/bin/python setup.py -q native --configure-only
	@sh .make/lint.sh

bench:
	@python=$$(sh .make/system.sh build bench) && sh .make/packages.sh "$$python" bench
	@sh .make/install.sh --with-bench
	@sh .make/bench.sh $(ARGS)

comparison:
	@python=$$(sh .make/system.sh build bench) && sh .make/packages.sh "$$python" bench
	@sh .make/install.sh
	@$(VENV)/bin/python bench/comparison/compare.py $(ARGS)

fuzz:
	@python=$$(sh .make/system.sh build fuzz) && sh .make/packages.sh "$$python"
	@$(VENV)/bin/python tests/fuzz/run.py $(ARGS)

chaos:
	@python=$$(sh .make/system.sh build test) && sh .make/packages.sh "$$python" test
	@sh .make/install.sh
	@$(VENV)/bin/python tests/chaos/chaos.py --report build/chaos.md $(ARGS)

test-sim:
	@python=$$(sh .make/system.sh sim) && "$$python" tests/sim/simulation.py $(ARGS)

test-asan:
	@python=$$(sh .make/system.sh build test) && sh .make/packages.sh "$$python"
	@sh .make/sanitize.sh address

test-tsan:
	@python=$$(sh .make/system.sh build test) && sh .make/packages.sh "$$python"
	@sh .make/sanitize.sh thread

gpu-folder:
	@python=$$(sh .make/system.sh build test) && sh .make/packages.sh "$$python"
	@sh .make/gpu_folder.sh

test-gpu:
	@sh .make/gpu.sh test $(ARGS)

bench-gpu:
	@sh .make/gpu.sh bench $(ARGS)

clean:
	rm -rf build python/*.egg-info simulator/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find python simulator tests bench examples -name __pycache__ -prune -exec rm -rf {} +
