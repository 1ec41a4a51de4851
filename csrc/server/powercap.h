// SPDX-License-Identifier: Apache-2.0
#pragma once
// The energy used by this machine's processors and memory, from Linux's powercap tree: the RAPL counters of Intel and
// AMD processors. Only root may read them, unless an administrator allows others to.
//
//   intel-rapl:0      name "package-0", energy_uj, max_energy_range_uj     a processor: summed
//   intel-rapl:0:0    name "core"                                          a part of its processor
//   intel-rapl:0:1    name "dram"                                          not part of its processor: summed
//   intel-rapl:1      name "psys"                                          the platform, including processors
//   intel-rapl-mmio:0 name "package-0"                                     the same counter through another interface

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"

namespace penstock::server {

inline constexpr char kPowercapFolder[] = "/sys/class/powercap";

// Thread-compatible.
class Powercap {
 public:
  // Finds the counters under `folder` and reads each once. kUnsupported, with the file and the reason, if there are
  // none or one cannot be read: the sum of the others would not be the energy of the machine.
  static Result<Powercap> open(const std::string& folder);

  // Microjoules since it was opened. A counter wraps around after 15 minutes at the earliest and must be read before
  // that. An error as above is permanent: the energy used meanwhile is unknown.
  Result<uint64_t> read();

 private:
  struct Zone {
    std::string counter;  // the path of energy_uj
    uint64_t range_uj = 0;
    uint64_t last_uj = 0;
  };

  std::vector<Zone> zones_;
  uint64_t total_uj_ = 0;
};

}  // namespace penstock::server
