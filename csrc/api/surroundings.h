// SPDX-License-Identifier: Apache-2.0
#pragma once
// The surroundings of the library: thread and process settings that change the results of operators, programs installed
// alongside it, the loaded torch, limits from the environment, and CPUs.

#include <cstdint>
#include <optional>
#include <string>

#include "base/result.h"
#include "penstock/export.h"

namespace penstock::api {

// Returns a description of a thread or process setting that changes the results of operators and is not at its default;
// none if all are. Workers use the defaults.
std::optional<std::string> odd_surroundings();

// The path of a program that is installed in the folder of libpenstock.so; if it is not in that folder, its bare name,
// which is looked up on PATH.
std::string program_next_to_library(const std::string& name);

// The torch version that is loaded in this process; `otherwise` if it does not report its version (before 2.9).
TorchVersion loaded_torch(TorchVersion otherwise);

// Throws Error kUnsupported if `who` ("this program", "the plug-in PATH") was compiled with headers of a different
// torch version than this library, or if a different version is loaded.
void check_torch(TorchVersion compiled_with, const std::string& who);

// The limit on a worker's shared memory, and on the memory that a trainer receives batches into: PENSTOCK_ARENA_BYTES.
// kMalformed if it is not a positive number.
Result<uint64_t> arena_bytes();
// The limit on a single object that a worker accepts from a trainer: PENSTOCK_JOB_BYTES.
Result<uint64_t> job_bytes();

// The number of CPUs that this process may use: limited by affinity, by the quotas of its cgroups (version 2), and by
// its share of a machine that several ranks train on. At least 1.
uint32_t usable_cpus();

}  // namespace penstock::api
