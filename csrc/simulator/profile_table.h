// SPDX-License-Identifier: Apache-2.0
#pragma once
// The models' profiles from a CSV table. Pure; a caller reads the file.
//
//   model,class,iteration_s,batch,sample_bytes,cpu1,cpu2,...  sample_bytes is optional; without it links are unused
//
// `class` is image, language, speech or other. `cpuN` is the speed of a GPU with N CPUs, in any unit that is the same
// for a model; `iteration_s` is the time of an iteration at speed 1, at which a job's duration is measured.

#include <string_view>
#include <vector>

#include "simulator/world.h"

namespace penstock::simulator {

inline constexpr size_t kTableCpusMax = 1024;  // columns

struct ProfileTable {
  std::vector<Profile> profiles{};
};

// `file` is a name for messages. kMalformed: names the line, its fault and the remedy.
Result<ProfileTable> parse_profiles(std::string_view file, std::string_view text);

}  // namespace penstock::simulator
