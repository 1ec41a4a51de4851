// SPDX-License-Identifier: Apache-2.0
#pragma once
// A device that batches are copied to: its memory, one stream of copies, and marks in that stream. What came with fewer
// bytes is widened there, behind its copy. CUDA's is cuda_device.h. The tests have one whose copies end late, out of
// order, or with an error.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/result.h"
#include "wire/widening.h"

namespace penstock::loader {

// The end of all work that was started before the event was recorded. May outlive its device.
class DeviceEvent {
 public:
  DeviceEvent() = default;
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;
  virtual ~DeviceEvent() = default;
};

// Host memory that devices read by themselves.
class MemoryRegistrar {
 public:
  MemoryRegistrar() = default;
  MemoryRegistrar(const MemoryRegistrar&) = delete;
  MemoryRegistrar& operator=(const MemoryRegistrar&) = delete;
  virtual ~MemoryRegistrar() = default;

  // Lets devices read `memory` by themselves until unregister_memory(). Returns false where they cannot.
  virtual bool register_memory(std::span<std::byte> memory) = 0;
  virtual void unregister_memory(std::byte* base) = 0;
};

// Registered memory that a program copies from, on any device and any stream. Knows when a copy still reads it, from
// what torch reports of its own asynchronous copies. CUDA's is in cuda_device.h. Thread-safe.
class WatchedMemory : public MemoryRegistrar {
 public:
  enum class Reads {
    kNone,      // all copies from the memory are over
    kUnderWay,  // some are not
    kUnknown,   // it may be read for as long as the process lives: by a captured graph, or by a device that was lost
  };

  // Of the memory that was registered at `base`.
  virtual Reads reads(std::byte* base) = 0;
  // Blocks until the copies from the memory are over; kUnknown if that cannot be known.
  virtual Reads wait_for_reads(std::byte* base) = 0;
};

// hand_over() is for the trainer's thread, the rest for one other thread, or for the owner once that has ended.
class Device : public MemoryRegistrar {
 public:
  // For people: "cuda:0".
  virtual std::string name() const = 0;

  // A tensor on the device with the dtype, sizes and strides of `like`, of whatever values. kNoMemory where the device
  // has none left. The memory may be freed at any time: it is used again only behind the work that was started on it.
  virtual Result<at::Tensor> allocate(const at::Tensor& like) = 0;

  // Starts copying the bytes of `host` to a tensor that was allocated for it. `host` stays as it is until an event that
  // is recorded later is over. An error may have started the copy.
  virtual Result<void> copy(const at::Tensor& host, const at::Tensor& on_device) = 0;

  // Whether widen() works. Without it, tensors are widened on the host before they are copied.
  virtual bool can_widen() const = 0;

  // Of one tensor. The sums over rows of some versions of CUB count in 32 bits.
  static constexpr uint64_t kWidenedRowsMax = INT32_MAX;

  // Bytes on the device that widen() needs beside those of the tensor.
  virtual Result<uint64_t> scratch_bytes(const wire::Widening& widening) = 0;

  // Starts widening the bytes that are copied to `narrow` to `target`, behind all that was started before. `scratch`
  // has the bytes for it, and may be undefined if there are none. An error may have started it.
  virtual Result<void> widen(const wire::Widening& widening, const at::Tensor& narrow, const at::Tensor& scratch,
                             const at::Tensor& target) = 0;

  virtual Result<std::shared_ptr<DeviceEvent>> record() = 0;

  // Whether an event is over. After an error nobody knows.
  virtual Result<bool> is_over(const DeviceEvent& event) = 0;

  // Waits until an event is over. Blocks. May be called by the trainer's thread, too.
  virtual Result<void> wait_for(const DeviceEvent& event) = 0;

  // Waits for all work that was started. Blocks. After an error nobody knows whether it is over, nor will anybody.
  virtual Result<void> wait_for_all() = 0;

  // Has the caller's current stream wait for `event`, and keeps the memory of `tensors` until that stream has used
  // them. Does not block the host.
  virtual Result<void> hand_over(const DeviceEvent& event, std::span<const at::Tensor> tensors) = 0;
};

}  // namespace penstock::loader
