// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory of the simulated GPU. A device's pointer lies in address space that nobody may access: a host that reads or
// writes through it dies with SIGSEGV. The bytes lie elsewhere, at on_host(pointer), for kernels and copies alone.
// Freed memory is used again as torch's caching allocator does: at once by the stream that it was allocated on, by
// others when the work of all of its streams is over.

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>

#include "streams.h"

namespace simgpu {

// The bytes behind a device's pointer.
std::byte* on_host(const void* pointer);
c10::DeviceIndex device_of(const void* pointer);

c10::DeviceAllocator& device_allocator();
// Allocates on the device, for its current stream. Raises OutOfMemoryError.
c10::DataPtr allocate(c10::DeviceIndex device, size_t bytes);
void record_use(const void* base, c10::Stream stream);

// Of all tensors that are alive; 0 bytes are no limit beyond the device's own.
void set_memory_limit(c10::DeviceIndex device, size_t bytes);
size_t allocated_bytes(c10::DeviceIndex device);

// Memory of the host that copies may read and write while the program goes on.
at::HostAllocator& pinned_allocator();
bool is_pinned(const void* pointer);
void register_host(const void* base, size_t bytes);
void unregister_host(const void* base);

}  // namespace simgpu
