# SPDX-License-Identifier: Apache-2.0
# Read by the other scripts: the virtual environment that they use, and how they speak. What is being done goes to standard error, so that a command whose output is
# wanted (`make -s demo ARGS="--json -"`) can still be piped.

: "${VENV:=.venv}"

if [ -t 2 ]; then
  say() { printf '\033[1m== %s\033[0m\n' "$*" >&2; }
else
  say() { printf '== %s\n' "$*" >&2; }
fi

# Ends the script with a message, one line per argument.
stop() {
  printf '\n' >&2
  printf '%s\n' "$@" >&2
  exit 1
}
