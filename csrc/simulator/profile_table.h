// SPDX-License-Identifier: Apache-2.0
#pragma once
// The models' profiles from a table in CSV. Pure; a caller reads the file.
//
//   model,class,iteration_s,batch,sample_bytes,cpu1,cpu2,...   sample_bytes may be left out: nothing crosses links
//
// `class` is image, language, speech or other. `cpuN` is the speed of a GPU with N CPUs, in any unit that is the same
// for a model; `iteration_s` is the time of an iteration at speed 1, and a job's duration is measured at it.

#include <string_view>
#include <vector>

#include "simulator/world.h"

namespace penstock::simulator {

inline constexpr size_t kTableCpusMax = 1024;  // columns

struct ProfileTable {
  std::vector<Profile> profiles{};
};

// `file` is a name for messages. kMalformed: the line, its fault and the remedy.
Result<ProfileTable> parse_profiles(std::string_view file, std::string_view text);

}  // namespace penstock::simulator
