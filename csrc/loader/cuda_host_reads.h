// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which copies still read host memory that this process has registered with CUDA. Torch reports each asynchronous copy
// between host and device to its host allocator (at::HostAllocator::record_event), which keeps pinned memory from being
// used again until the copy's stream has passed. An allocator in front of torch's own sees these reports, takes those
// about registered slabs, and hands all else on. So a slab is protected exactly as far as torch's pinned memory is.
//
// Other ways were considered: events of ours on every stream of the process cannot be had (streams of other libraries
// are not listed), and copying every batch into torch's memory costs a core.

#include <cstddef>
#include <memory>

#include "base/result.h"
#include "loader/device.h"

namespace penstock::loader {

// kUnsupported where there is no CUDA device, or where torch's reports cannot be had. The first call puts the allocator
// in front; torch reads its place without a lock, so no other thread may set a host allocator meanwhile.
Result<std::unique_ptr<WatchedMemory>> make_cuda_watched_memory();

}  // namespace penstock::loader
