// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tracks which copies still read host memory that this process has registered with CUDA. Torch reports each
// asynchronous copy between host and device to its host allocator (at::HostAllocator::record_event), which prevents the
// reuse of pinned memory until the copy's stream has passed. An allocator in front of torch's receives these reports,
// handles those about registered slabs, and forwards all others. So a slab is protected exactly as well as torch's
// pinned memory.
//
// Alternatives considered: separate events on every stream of the process are impossible (streams of other libraries
// are not listed), and copying every batch into torch's memory costs a core.

#include <cstddef>
#include <memory>

#include "base/result.h"
#include "device/device.h"

namespace penstock::device {

// Fails with kUnsupported without a CUDA device, or if torch's reports are not available. The first call installs the
// allocator; torch reads the allocator's place without a lock, so no other thread may set a host allocator meanwhile.
Result<std::unique_ptr<WatchedMemory>> make_cuda_watched_memory();

}  // namespace penstock::device
