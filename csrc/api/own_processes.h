// SPDX-License-Identifier: Apache-2.0
#pragma once
// Worker processes that a trainer starts itself: native ones for a plug-in, Python ones for a Python dataset. They
// serve like pool workers and are reached over loopback with the keys that this user's processes share.

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "base/child_process.h"
#include "base/result.h"
#include "pool_client/pool_directory.h"

namespace penstock::api {

// Confined to the trainer's thread. Destroying it ends the processes.
class OwnProcesses {
 public:
  enum class Kind : uint8_t { kNative, kPython };

  // Waits until all of them listen. If one does not: kFailed, kTimeout or kUnsupported, with a message for the user.
  static Result<OwnProcesses> start(Kind kind, int64_t count);

  OwnProcesses(OwnProcesses&&) noexcept = default;
  OwnProcesses& operator=(OwnProcesses&&) noexcept = default;
  ~OwnProcesses();

  const std::vector<pool_client::OwnWorker>& workers() const { return workers_; }

  struct Loss {
    uint64_t worker_id = 0;
    pid_t pid = 0;
    std::string how{};  // "was ended by SIGKILL ..."
  };
  // The processes that have died since the last call.
  std::vector<Loss> take_losses();
  bool are_all_lost() const { return !processes_.empty() && lost_.size() == processes_.size(); }

 private:
  OwnProcesses() = default;

  std::vector<ChildProcess> processes_;
  std::vector<pool_client::OwnWorker> workers_;
  std::set<size_t> lost_;
};

}  // namespace penstock::api
