// SPDX-License-Identifier: Apache-2.0
#pragma once
// Worker processes that a trainer starts itself: native ones for a plug-in, Python ones for a dataset in Python. They
// serve as a pool's workers do, and are reached on loopback with the keys that this user's processes share.

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "base/child_process.h"
#include "base/result.h"
#include "loader/pool_directory.h"

namespace penstock::api {

// Confined to the trainer's thread. Destroying it ends the processes.
class OwnProcesses {
 public:
  enum class Kind : uint8_t { kNative, kPython };

  // Waits until each of them listens. kFailed, kTimeout or kUnsupported with a text for the user where one does not.
  static Result<OwnProcesses> start(Kind kind, int64_t count);

  OwnProcesses(OwnProcesses&&) noexcept = default;
  OwnProcesses& operator=(OwnProcesses&&) noexcept = default;
  ~OwnProcesses();

  const std::vector<loader::OwnWorker>& workers() const { return workers_; }

  struct Loss {
    uint64_t worker_id = 0;
    pid_t pid = 0;
    std::string how{};  // "was ended by SIGKILL ..."
  };
  // Those that have died since the last call.
  std::vector<Loss> take_losses();
  bool are_all_lost() const { return !processes_.empty() && lost_.size() == processes_.size(); }

 private:
  OwnProcesses() = default;

  std::vector<ChildProcess> processes_;
  std::vector<loader::OwnWorker> workers_;
  std::set<size_t> lost_;
};

}  // namespace penstock::api
