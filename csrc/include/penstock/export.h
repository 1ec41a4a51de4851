// SPDX-License-Identifier: Apache-2.0
#pragma once
// The version of penstock, and the mark of what its shared library exports.

#include <cstdint>

#define PENSTOCK_VERSION "0.1.0"

// The library is built with hidden symbols; what a program may use has this mark.
#define PENSTOCK_API __attribute__((visibility("default")))
// What a class with that mark keeps to the library.
#define PENSTOCK_HIDDEN __attribute__((visibility("hidden")))
