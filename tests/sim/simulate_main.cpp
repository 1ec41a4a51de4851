// SPDX-License-Identifier: Apache-2.0
// Runs simulated pools, one for each seed, and names the seeds that break an invariant.
//
//     simulate --seeds 200000 [--first 1] [--stop-at-first]
//     simulate --replay SEED              the same run again, with all that happens in it

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>
#include <string_view>

#include "scenario.h"
#include "world.h"

namespace {

constexpr uint64_t kShownMax = 10;

int usage() {
  std::cerr << "usage: simulate --seeds COUNT [--first SEED] [--stop-at-first] | --replay SEED\n";
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  using penstock::sim::Scenario;
  using penstock::sim::World;
  uint64_t first = 1;
  uint64_t count = 0;
  bool stops_at_first = false;
  bool is_replay = false;
  for (int index = 1; index < argc; ++index) {
    const std::string_view option = argv[index];
    if (option == "--stop-at-first") {
      stops_at_first = true;
      continue;
    }
    if (index + 1 == argc) return usage();
    const uint64_t value = std::strtoull(argv[++index], nullptr, 10);
    if (option == "--seeds") {
      count = value;
    } else if (option == "--first") {
      first = value;
    } else if (option == "--replay") {
      first = value;
      count = 1;
      is_replay = true;
    } else {
      return usage();
    }
  }
  if (count == 0) return usage();

  uint64_t failed_count = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const Scenario scenario = Scenario::draw(seed);
    if (is_replay) std::cout << scenario.describe() << "\n";
    World world(scenario, is_replay ? &std::cout : nullptr);
    const auto violated = world.run();
    if (!violated) continue;
    if (++failed_count <= kShownMax)
      std::cout << "seed " << seed << ": " << *violated << "; replay it with: " << argv[0] << " --replay " << seed
                << "\n";
    if (stops_at_first) break;
  }
  std::cout << count << " schedules from seed " << first << ": " << failed_count << " failed\n";
  return failed_count == 0 ? 0 : 1;
}
