// SPDX-License-Identifier: Apache-2.0
#pragma once
// Copies to a device that were started, and what they read. A slab that a copy reads is leased until the copy is known
// to be over, by its event or by a wait for all copies. If neither can be had, the device is lost to this process and
// may go on reading for as long as it likes: such slabs stay mapped, and are retired, so that no worker ever writes to
// them again.

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "loader/device.h"
#include "loader/slab_lease.h"

namespace penstock::loader {

// The sources of copies that are started together: the host tensors share the slab's lease.
struct CopySources {
  c10::intrusive_ptr<SlabLease> lease;
  std::vector<at::Tensor> tensors;
};

// Confined to the thread that starts the copies. `device` outlives it. The destructor waits for the copies.
class CopiesUnderWay {
 public:
  explicit CopiesUnderWay(Device& device) : device_(device) {}
  CopiesUnderWay(const CopiesUnderWay&) = delete;
  CopiesUnderWay& operator=(const CopiesUnderWay&) = delete;
  ~CopiesUnderWay();

  // kFailed once the device was lost.
  Result<void> check() const;
  // To be called when all copies from `sources` were started: the event is over when they are.
  Result<std::shared_ptr<DeviceEvent>> add(CopySources sources);
  // Some of the copies may have been started, and no event says when they are over. The error for the user.
  Fault give_up(CopySources sources, const Fault& cause);
  // Gives back what is over. Returns how many are under way.
  size_t reclaim();

  // Slabs that are never given back, since the device was lost while it might have read them.
  size_t retired_count() const { return retired_count_; }

 private:
  struct Copy {
    std::shared_ptr<DeviceEvent> event;  // none of those that were given up
    CopySources sources;
  };

  void settle();
  void lose(const std::string& cause);
  Fault loss() const;

  Device& device_;
  std::deque<Copy> copies_;
  std::string loss_;  // its cause; empty while the device is there
  size_t retired_count_ = 0;
};

}  // namespace penstock::loader
