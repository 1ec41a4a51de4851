// SPDX-License-Identifier: Apache-2.0
#pragma once
// Determines which calls of a captured program have to run to assemble a part of it: the requested calls, the calls
// whose results they read, and the other calls of their units, which write to the same memory.

#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace penstock::graph {

struct CapturedCall {
  uint32_t unit = 0;
  bool is_droppable = false;        // it does not compute, so it may run even if its unit may not
  bool reads_intermediate = false;  // a value that is not the result of a call, so it cannot be assembled
  std::vector<uint32_t> reads{};    // calls whose results are not available otherwise
};

// Why a call cannot run.
struct CallFault {
  enum class Kind : uint8_t { kForbidden, kReadsIntermediate };
  Kind kind = Kind::kForbidden;
  uint32_t call = 0;
  std::optional<uint32_t> reader{};  // the call that needs it, if it was not requested itself

  friend bool operator==(const CallFault&, const CallFault&) = default;
};

// Thread-compatible. Calls are given in program order and identified by their place in it.
class NeededCalls {
 public:
  NeededCalls(std::vector<CapturedCall> calls, std::set<uint32_t> forbidden_units);

  // Requests a call and all that it needs. After a fault the set must not be used.
  std::optional<CallFault> need(uint32_t call);
  // Requests a region of the program: its first and last call have to enclose the calls between them, if one of these
  // is needed.
  void need_region(uint32_t first, uint32_t last);

  const std::set<uint32_t>& calls() const { return needed_; }

 private:
  const std::vector<CapturedCall> calls_;
  const std::set<uint32_t> forbidden_;
  std::vector<std::vector<uint32_t>> members_;  // by unit, without droppable calls
  std::set<uint32_t> needed_;
};

}  // namespace penstock::graph
