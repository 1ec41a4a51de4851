#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: install.sh [--with-tests] [--with-bench]
# Compiles what changed, with the compilers' progress in sight, and installs penstock with its simulator into .venv when
# anything that goes into them changed.
set -eu
. .make/say.sh

sources="CMakeLists.txt setup.py pyproject.toml README.md LICENSE cmake csrc python simulator third_party"
# What is installed is known by the content of its sources and by the torch it was built against.
state=$({
  find $sources -type f ! -name '*.pyc' ! -path '*.egg-info/*' -exec cksum {} + | sort -k 3
  "$VENV"/bin/python -c 'from importlib.metadata import version; print(version("torch"))'
} | cksum)
stamp="$VENV"/.installed

if [ "$#" -gt 0 ] || [ "$(cat "$stamp" 2>/dev/null)" != "$state" ]; then
  say "Compiling (on two cores 4 to 6 minutes the first time; then only what changed)"
  "$VENV"/bin/python setup.py -q native "$@" >&2
fi
if [ "$(cat "$stamp" 2>/dev/null)" != "$state" ]; then
  say "Installing penstock into $VENV"
  "$VENV"/bin/python -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps . ./simulator >&2
  echo "$state" >"$stamp"
fi
