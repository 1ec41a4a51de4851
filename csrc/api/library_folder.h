// SPDX-License-Identifier: Apache-2.0
#pragma once
// Programs installed in the folder of libpenstock.so.

#include <string>

namespace penstock::api {

// The program's path; if it is not in that folder, its bare name, which is looked up on PATH.
std::string program_beside_library(const std::string& name);

}  // namespace penstock::api
