#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: gpu_folder.sh
# Puts into build/gpu-folder what a machine without a package registry needs beside the tree to build penstock and run its
# GPU tests: headers and libraries of this system, and Python wheels. The machine has torch, nvcc, g++, cmake and ninja.
# GPU_PYTHON is its version of Python, 3.12 if it is not set.
set -eu
. .make/say.sh

folder=build/gpu-folder
megabytes_max=64
rm -rf "$folder"
mkdir -p "$folder/prefix/include" "$folder/prefix/lib" "$folder/wheels"

say "Headers and libraries"
for header in zmq.h zmq.hpp zmq_utils.h sodium.h sodium openssl nlohmann jpeglib.h jmorecfg.h libdeflate.h gtest; do
  cp -rL "/usr/include/$header" "$folder/prefix/include/"
done
machine=$(cc -print-multiarch 2>/dev/null || true)
[ ! -d "/usr/include/$machine/openssl" ] || cp -L "/usr/include/$machine/openssl/"* "$folder/prefix/include/openssl/"
for place in "/usr/include/$machine" /usr/include; do
  [ ! -e "$place/jconfig.h" ] || { cp -L "$place/jconfig.h" "$folder/prefix/include/" && break; }
done

# The file that a linker would take for -lNAME.
find_library() {
  for place in "/usr/lib/$machine" /usr/lib64 /usr/lib /usr/local/lib; do
    [ ! -e "$place/lib$1" ] || { echo "$place/lib$1" && return; }
  done
  stop "lib$1 is not on this system; run make test here once, which installs it"
}
cp -L "$(find_library gtest.a)" "$(find_library gtest_main.a)" "$folder/prefix/lib/"
for name in zmq sodium crypto deflate; do
  library=$(find_library "$name.so")
  cp -L "$library" "$folder/prefix/lib/"
  # By the name that programs ask for at run time, with what the library itself needs. The C and C++ libraries are the
  # machine's own.
  cp -L "$library" "$folder/prefix/lib/$(objdump -p "$library" | awk '$1 == "SONAME" {print $2}')"
  ldd "$library" | awk '$2 == "=>" && $3 ~ /^\// {print $3}' |
    grep -Ev '/(libc|libm|libpthread|libresolv|librt|libdl|libstdc\+\+|libgcc_s)\.so' | while read -r needed; do
    cp -L "$needed" "$folder/prefix/lib/"
  done
done

say "Python wheels"
"$VENV"/bin/python -m pip download --quiet --dest "$folder/wheels" --only-binary :all: --implementation cp \
  --python-version "${GPU_PYTHON:-3.12}" --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
  --platform manylinux_2_17_x86_64 -r .make/gpu_packages.txt >&2

size=$(du -sm "$folder" | cut -f 1)
glibc=$(objdump -T "$folder"/prefix/lib/*.so* | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -1)
say "$folder has $size MB; its libraries need ${glibc#GLIBC_} or later of glibc on the machine"
[ "$size" -le "$megabytes_max" ] || stop "$folder is above $megabytes_max MB, which is what may be carried to the machine"
