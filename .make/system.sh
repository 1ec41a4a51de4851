#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: system.sh build|test|bench|docs|browser|clang|lint|sim|model|fuzz...
# Finds what the named groups need from the system, and installs what is missing with apt when it may (as root, or with a
# sudo that asks no password). Where it may not, it stops and names the packages and the command. Prints the Python to
# make the virtual environment with.
set -eu
. .make/say.sh

missing=    # Debian packages without which nothing can be built

has_package() {
  command -v dpkg-query >/dev/null && [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# A tool or header may also come from elsewhere than Debian's package, so that is looked at first.
need_tool() { command -v "$1" >/dev/null || missing="$missing $2"; }
need_header() {
  for folder in /usr/include /usr/local/include; do
    [ ! -e "$folder/$1" ] || return 0
  done
  has_package "$2" || missing="$missing $2"
}

# Python 3.10 or later with what a virtual environment and an extension module take: venv, pip's installer, headers.
is_good_python() {
  "$1" -c '
import os, sys, sysconfig
if not (3, 10) <= sys.version_info[:2] <= (3, 14): sys.exit(1)
if sys.argv[1] == "new": import ensurepip, venv
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' "$2" >/dev/null 2>&1
}

find_python() {
  if [ -x "$VENV"/bin/python ] && is_good_python "$VENV"/bin/python existing; then
    echo "$VENV"/bin/python
    return 0
  fi
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10 /usr/bin/python3}; do
    if command -v "$candidate" >/dev/null && is_good_python "$candidate" new; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

for group in "$@"; do
  case $group in
    build)
      need_tool g++ g++
      need_tool cmake cmake
      need_tool ninja ninja-build
      need_header zmq.h libzmq3-dev
      need_header zmq.hpp cppzmq-dev
      need_header sodium.h libsodium-dev
      need_header openssl/evp.h libssl-dev
      need_header nlohmann/json.hpp nlohmann-json3-dev
      need_header jpeglib.h libjpeg-dev
      need_header libdeflate.h libdeflate-dev
      ;;
    test)
      need_header gtest/gtest.h libgtest-dev
      need_tool sbatch slurm-wlm # whose daemons the tests of its engine start themselves
      need_tool munge munge
      need_tool shellcheck shellcheck           # of deploy's scripts
      need_tool systemd-analyze systemd         # and of its units
      need_tool pkg-config pkg-config
      ;;
    bench)
      need_header benchmark/benchmark.h libbenchmark-dev
      ;;
    lint)
      need_tool clang-format-14 clang-format-14
      need_tool clang-tidy-14 clang-tidy-14
      ;;
    docs) need_tool doxygen doxygen ;;
    browser) # of the dashboard's tests, which skip without one; elsewhere it is no Debian package
      if grep -qs '^ID=debian' /etc/os-release; then
        need_tool chromium chromium
        need_tool chromedriver chromium-driver
        has_package fonts-dejavu-core || missing="$missing fonts-dejavu-core"
      fi
      ;;
    clang) need_tool clang++-14 clang-14 ;; # a second compiler for programs in C++
    sim) need_tool g++ g++ ;;
    model)
      need_tool spin spin
      need_tool gcc gcc
      ;;
    fuzz)
      need_tool g++ g++ # for the C++ library that clang uses
      need_tool cmake cmake
      need_tool ninja ninja-build
      need_tool clang++-14 clang-14
      need_header libdeflate.h libdeflate-dev
      has_package libclang-rt-14-dev || ls /usr/lib/llvm-14/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a >/dev/null 2>&1 ||
        missing="$missing libclang-rt-14-dev"
      ;;
    *) stop "system.sh: there is no group '$group'" ;;
  esac
done

python=$(find_python) || missing="$missing python3 python3-venv python3-dev"

as_root=
if [ "$(id -u)" != 0 ]; then
  if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then as_root="sudo -n"; else as_root=no; fi
fi

if [ -n "$missing" ] && [ "$as_root" != no ] && command -v apt-get >/dev/null; then
  say "Installing Debian packages (about a minute):$missing"
  if ! { $as_root apt-get update -qq &&
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing; } >&2; then
    stop "apt-get could not install:$missing" "Its messages are above. Install them, then run make again."
  fi
elif [ -n "$missing" ]; then
  stop "These packages are missing:$missing" "penstock cannot install them itself: that takes root, or sudo without a password, and apt-get." \
    "Install them, then run make again:" "" "    sudo apt-get install -y$missing"
fi

[ -n "$python" ] || python=$(find_python) || stop "There is no Python from 3.10 to 3.14 with venv, ensurepip and headers here." \
  "Install one (on Debian 12, Ubuntu 22.04 and later: python3 python3-venv python3-dev)," "or name one: make PYTHON=/path/to/python3"
echo "$python"
