#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: packages.sh PYTHON [GROUP...]
# Makes $VENV (.venv) with PYTHON and installs what pyproject.toml lists: what a build needs, the project's own dependencies, and
# the optional groups. What was installed is remembered in .venv, so that it is done once per change of the lists.
set -eu
. .make/say.sh

python=$1
shift
if [ ! -x "$VENV"/bin/python ] || ! "$VENV"/bin/python -c '' 2>/dev/null; then
  say "Making a virtual environment in $VENV with $("$python" -V)"
  rm -rf "$VENV"
  "$python" -m venv "$VENV"
fi
"$VENV"/bin/python -m pip --version >/dev/null 2>&1 || "$VENV"/bin/python -m ensurepip --upgrade >&2

# PyTorch comes first and alone, so that what takes long is seen to be that.
for group in build "$@"; do
  stamp="$VENV"/.packages-$group
  requirements=$("$VENV"/bin/python .make/requirements.py "$group")
  if [ "$(cat "$stamp" 2>/dev/null)" != "$requirements" ]; then
    case $group in
      build) say "Installing PyTorch into $VENV (with its CUDA libraries 3 GB to fetch; 2 to 15 minutes)" ;;
      *) say "Installing the $group packages into $VENV (about a minute)" ;;
    esac
    printf '%s\n' "$requirements" >"$stamp.wanted"
    "$VENV"/bin/python -m pip install --disable-pip-version-check -r "$stamp.wanted" >&2
    mv "$stamp.wanted" "$stamp"
  fi
done
