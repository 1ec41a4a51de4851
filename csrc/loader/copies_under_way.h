// SPDX-License-Identifier: Apache-2.0
#pragma once
// The running copies to a device and their sources. A slab that a copy reads is leased until the copy is known to be
// finished, from its event or from a wait for all copies. If neither succeeds, the device is lost to this process and
// may keep reading indefinitely: such slabs stay mapped and are retired, so that no worker ever writes to them again.

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "device/device.h"
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
  explicit CopiesUnderWay(device::Device& device) : device_(device) {}
  CopiesUnderWay(const CopiesUnderWay&) = delete;
  CopiesUnderWay& operator=(const CopiesUnderWay&) = delete;
  ~CopiesUnderWay();

  // Fails with kFailed once the device was lost.
  Result<void> check() const;
  // Call when all copies from `sources` were started: the event completes with them.
  Result<std::shared_ptr<device::DeviceEvent>> add(CopySources sources);
  // Call when some of the copies may have been started, without an event that shows their end. Returns the error for
  // the user.
  Fault give_up(CopySources sources, const Fault& cause);
  // Releases the sources of finished copies. Returns the number of running copies.
  size_t reclaim();

  // Slabs that are never released, because the device was lost while it might have been reading them.
  size_t retired_count() const { return retired_count_; }

 private:
  struct Copy {
    std::shared_ptr<device::DeviceEvent> event;  // none for copies passed to give_up()
    CopySources sources;
  };

  void settle();
  void lose(const std::string& cause);
  Fault loss() const;

  device::Device& device_;
  std::deque<Copy> copies_;
  std::string loss_;  // the cause of the loss; empty while the device works
  size_t retired_count_ = 0;
};

}  // namespace penstock::loader
