// SPDX-License-Identifier: Apache-2.0
#pragma once
// A powercap tree of a test, with the files that Linux has there.

#include <cstdint>
#include <filesystem>
#include <string>

#include "../base/temp_folder.h"

namespace penstock::worker {

class PowercapFolder {
 public:
  // A zone such as "intel-rapl:0", and what it counts.
  void add(const std::string& zone, const std::string& name, uint64_t range_uj, uint64_t energy_uj) {
    std::filesystem::create_directories(folder_ / zone);
    test::write_file(file(zone, "name"), name + "\n");
    test::write_file(file(zone, "enabled"), "0\n");
    test::write_file(file(zone, "max_energy_range_uj"), std::to_string(range_uj) + "\n");
    set(zone, energy_uj);
  }
  void set(const std::string& zone, uint64_t energy_uj) {
    test::write_file(file(zone, "energy_uj"), std::to_string(energy_uj) + "\n");
  }
  std::string file(const std::string& zone, const std::string& name) const { return folder_ / (zone + "/" + name); }
  const std::string& path() const { return folder_.path(); }

 private:
  test::TempFolder folder_;
};

}  // namespace penstock::worker
