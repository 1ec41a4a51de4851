// SPDX-License-Identifier: Apache-2.0
#pragma once
// A device that batches are copied to: its memory, one stream for copies, and events in that stream. Narrow tensors are
// widened there, after their copy. CUDA's implementation is in cuda_device.h. The tests have one whose copies finish
// late, out of order, or with an error. StagedBytes counts the bytes of batches that wait, staged, for the trainer;
// caught() turns torch's exceptions into Results.

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "base/result.h"
#include "wire/narrow.h"

namespace penstock::device {

// The completion of all work that was started before the event was recorded. May outlive its device.
class DeviceEvent {
 public:
  DeviceEvent() = default;
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;
  virtual ~DeviceEvent() = default;
};

// Registers host memory so that devices can read it directly.
class MemoryRegistrar {
 public:
  MemoryRegistrar() = default;
  MemoryRegistrar(const MemoryRegistrar&) = delete;
  MemoryRegistrar& operator=(const MemoryRegistrar&) = delete;
  virtual ~MemoryRegistrar() = default;

  // Lets devices read `memory` directly until unregister_memory(). Returns false if they cannot.
  virtual bool register_memory(std::span<std::byte> memory) = 0;
  virtual void unregister_memory(std::byte* base) = 0;
};

// Registered memory that a program copies from, on any device and any stream. Torch's reports about its asynchronous
// copies show when a copy still reads it. CUDA's implementation is in cuda_device.h. Thread-safe.
class WatchedMemory : public MemoryRegistrar {
 public:
  enum class Reads {
    kNone,        // all copies from the memory are finished
    kInProgress,  // some are not
    kUnknown,     // it may be read until the process ends: by a captured graph, or by a lost device
  };

  // The state of the memory that was registered at `base`.
  virtual Reads reads(std::byte* base) = 0;
  // Blocks until the copies from the memory are finished; kUnknown if that cannot be determined.
  virtual Reads wait_for_reads(std::byte* base) = 0;
};

// hand_over() is for the trainer's thread, the rest for one other thread, or for the owner once that thread has ended.
class Device : public MemoryRegistrar {
 public:
  // For people, for example "cuda:0".
  virtual std::string name() const = 0;

  // Returns an uninitialised tensor on the device with the dtype, sizes and strides of `like`. Fails with kNoMemory if
  // the device has none left. The memory may be freed at any time: it is reused only after the work that was started on
  // it.
  virtual Result<at::Tensor> allocate(const at::Tensor& like) = 0;

  // Starts copying the bytes of `host` to a tensor that was allocated for it. `host` must stay unchanged until an event
  // that is recorded later is complete. After an error the copy may nevertheless have been started.
  virtual Result<void> copy(const at::Tensor& host, const at::Tensor& on_device) = 0;

  // Whether widen() is supported. Without it, tensors are widened on the host before they are copied.
  virtual bool can_widen() const = 0;

  // Limit for one tensor: sums over rows count in 32 bits in some versions of CUB.
  static constexpr uint64_t kWidenedRowsMax = INT32_MAX;

  // Device memory that widen() needs in addition to the tensor's, in bytes.
  virtual Result<uint64_t> scratch_bytes(const wire::Widening& widening) = 0;

  // Starts widening the bytes that are copied to `narrow` into `target`, after all work that was started before.
  // `scratch` has scratch_bytes() bytes, and may be undefined if that is 0. After an error the widening may
  // nevertheless have been started.
  virtual Result<void> widen(const wire::Widening& widening, const at::Tensor& narrow, const at::Tensor& scratch,
                             const at::Tensor& target) = 0;

  virtual Result<std::shared_ptr<DeviceEvent>> record() = 0;

  // Whether an event is complete. Unknown after an error.
  virtual Result<bool> is_over(const DeviceEvent& event) = 0;

  // Waits until an event is complete. Blocks. May also be called by the trainer's thread.
  virtual Result<void> wait_for(const DeviceEvent& event) = 0;

  // Waits for all work that was started. Blocks. After an error it stays unknown whether the work is complete.
  virtual Result<void> wait_for_all() = 0;

  // Makes the caller's current stream wait for `event`, and keeps the memory of `tensors` until that stream has used
  // them. Does not block the host.
  virtual Result<void> hand_over(const DeviceEvent& event, std::span<const at::Tensor> tensors) = 0;
};

// The bytes of batches that have passed the stages and were not delivered to the trainer yet. A batch holds its share
// of them until it is delivered or dropped. Thread-safe.
class StagedBytes {
 public:
  // Confined to the thread that holds the batch.
  class Share {
   public:
    Share() = default;
    Share(std::shared_ptr<std::atomic<uint64_t>> total, uint64_t bytes) : total_(std::move(total)), bytes_(bytes) {
      total_->fetch_add(bytes_);
    }
    Share(Share&& other) noexcept : total_(std::move(other.total_)), bytes_(other.bytes_) {}
    Share& operator=(Share&& other) noexcept {
      Share old(std::move(*this));
      total_ = std::move(other.total_);
      bytes_ = other.bytes_;
      return *this;
    }
    ~Share() {
      if (total_) total_->fetch_sub(bytes_);
    }

   private:
    std::shared_ptr<std::atomic<uint64_t>> total_;
    uint64_t bytes_ = 0;
  };

  Share take(uint64_t bytes) { return {total_, bytes}; }
  uint64_t value() const { return total_->load(); }

 private:
  // Owned by the chain and by the shares, which may outlive it.
  std::shared_ptr<std::atomic<uint64_t>> total_ = std::make_shared<std::atomic<uint64_t>>(0);
};

// Runs a call of torch that returns a Result, for code whose errors are Results: torch throws. Returns kNoMemory if a
// device has none left.
template <typename Call>
auto caught(Call call) -> decltype(call()) {
  try {
    return call();
  } catch (const c10::OutOfMemoryError& error) {
    return Fault{Errc::kNoMemory, error.what_without_backtrace()};
  } catch (const c10::Error& error) {
    return Fault{Errc::kFailed, error.what_without_backtrace()};
  } catch (const std::exception& error) {
    return Fault{Errc::kFailed, error.what()};
  }
}

}  // namespace penstock::device
