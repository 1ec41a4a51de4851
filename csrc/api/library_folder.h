// SPDX-License-Identifier: Apache-2.0
#pragma once
// Programs that are installed in the folder of libpenstock.so.

#include <string>

namespace penstock::api {

// Its path; where it is not there, the name alone, which is looked for on PATH.
std::string program_beside_library(const std::string& name);

}  // namespace penstock::api
