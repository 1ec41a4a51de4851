// SPDX-License-Identifier: Apache-2.0
#pragma once
// A powercap tree of a test, with the files that Linux has there. Without std::filesystem, which libtorch breaks.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace penstock::server {

class PowercapFolder {
 public:
  PowercapFolder() { EXPECT_NE(::mkdtemp(path_.data()), nullptr); }
  PowercapFolder(const PowercapFolder&) = delete;
  PowercapFolder& operator=(const PowercapFolder&) = delete;
  ~PowercapFolder() {
    for (const std::string& zone : zones_) {
      for (const char* name : {"name", "enabled", "max_energy_range_uj", "energy_uj"})
        ::unlink(file(zone, name).c_str());
      ::rmdir((path_ + "/" + zone).c_str());
    }
    ::rmdir(path_.c_str());
  }

  // A zone such as "intel-rapl:0", and what it counts.
  void add(const std::string& zone, const std::string& name, uint64_t range_uj, uint64_t energy_uj) {
    add_folder(zone);
    write(zone, "name", name + "\n");
    write(zone, "max_energy_range_uj", std::to_string(range_uj) + "\n");
    set(zone, energy_uj);
  }
  // One that is no zone.
  void add_folder(const std::string& zone) {
    EXPECT_EQ(::mkdir((path_ + "/" + zone).c_str(), 0700), 0);
    zones_.push_back(zone);
    write(zone, "enabled", "0\n");
  }
  void set(const std::string& zone, uint64_t energy_uj) { write(zone, "energy_uj", std::to_string(energy_uj) + "\n"); }
  void write(const std::string& zone, const std::string& name, const std::string& text) {
    std::ofstream(file(zone, name), std::ios::trunc) << text;
  }
  void remove(const std::string& zone, const std::string& name) { EXPECT_EQ(::unlink(file(zone, name).c_str()), 0); }
  const std::string& path() const { return path_; }

 private:
  std::string file(const std::string& zone, const std::string& name) const { return path_ + "/" + zone + "/" + name; }

  std::string path_ = "/tmp/penstock-powercap-XXXXXX";
  std::vector<std::string> zones_;
};

}  // namespace penstock::server
