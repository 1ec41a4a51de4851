// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which calls of a captured program have to run where a part of it is put together again: those that are asked for, the
// calls whose results they read, and the other calls of their units, which write to the same memory.

#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace penstock::graph {

struct CapturedCall {
  uint32_t unit = 0;
  bool is_droppable = false;        // it computes nothing, so it may run also where its unit may not
  bool reads_intermediate = false;  // a value that is no call's result, so that it cannot be put together again
  std::vector<uint32_t> reads{};    // calls whose results are not at hand otherwise
};

// Why a call cannot run.
struct CallFault {
  enum class Kind : uint8_t { kForbidden, kReadsIntermediate };
  Kind kind = Kind::kForbidden;
  uint32_t call = 0;
  std::optional<uint32_t> reader{};  // the call that needs it, where it was not asked for itself

  friend bool operator==(const CallFault&, const CallFault&) = default;
};

// Thread-compatible. Calls are given in program order and named by their place in it.
class NeededCalls {
 public:
  NeededCalls(std::vector<CapturedCall> calls, std::set<uint32_t> forbidden_units);

  // Asks for a call and all that it needs. After a fault the set must not be used.
  std::optional<CallFault> need(uint32_t call);
  // Asks for a region of the program, whose first and last call have to stand around every call between them, where one
  // of those is needed.
  void need_region(uint32_t first, uint32_t last);

  const std::set<uint32_t>& calls() const { return needed_; }

 private:
  const std::vector<CapturedCall> calls_;
  const std::set<uint32_t> forbidden_;
  std::vector<std::vector<uint32_t>> members_;  // by unit, without those that are droppable
  std::set<uint32_t> needed_;
};

}  // namespace penstock::graph
