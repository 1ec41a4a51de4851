// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_host_reads.h"

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "device/cuda_calls.h"

namespace penstock::device {
namespace {

// The last copy on one stream.
struct StreamRead {
  c10::Stream stream;
  cudaEvent_t event = nullptr;  // of the stream's device; reused for later copies
  bool is_in_progress = false;
};

// All registered memory of the process, by address. Thread-safe.
class HostReads {
 public:
  using Reads = WatchedMemory::Reads;

  void add(std::span<std::byte> memory) {
    const MutexLock lock(mutex_);
    ranges_[memory.data()] = {.end = memory.data() + memory.size()};
  }

  void remove(std::byte* base) {
    const MutexLock lock(mutex_);
    const auto range = ranges_.extract(base);
    if (range.empty()) return;
    for (const StreamRead& read : range.mapped().reads) static_cast<void>(result_of(cudaEventDestroy(read.event)));
  }

  // Notes that a copy was started on `stream` that reads or writes memory at `pointer`. Returns false if that memory is
  // not registered.
  bool note(std::byte* pointer, c10::Stream stream) {
    const MutexLock lock(mutex_);
    auto place = ranges_.upper_bound(pointer);
    if (place == ranges_.begin()) return false;
    Range& range = (--place)->second;
    if (pointer >= range.end) return false;
    // A copy whose end cannot be observed counts as never finished.
    if (!range.is_unknown && !try_record(range, stream)) range.is_unknown = true;
    return true;
  }

  Reads look(std::byte* base, bool waits) {
    const MutexLock lock(mutex_);
    const auto place = ranges_.find(base);
    if (place == ranges_.end()) return Reads::kNone;
    Range& range = place->second;
    for (StreamRead& read : range.reads) {
      if (range.is_unknown || !read.is_in_progress) continue;
      const cudaError_t status = waits ? cudaEventSynchronize(read.event) : cudaEventQuery(read.event);
      if (status == cudaErrorNotReady) {
        cudaGetLastError();
        return Reads::kInProgress;
      }
      read.is_in_progress = false;
      if (!result_of(status)) range.is_unknown = true;
    }
    return range.is_unknown ? Reads::kUnknown : Reads::kNone;
  }

 private:
  struct Range {
    std::byte* end = nullptr;
    std::vector<StreamRead> reads{};
    bool is_unknown = false;
  };

  static bool try_record(Range& range, c10::Stream stream) {
    const c10::cuda::CUDAStream cuda_stream(stream);
    const c10::cuda::CUDAGuard guard(stream.device_index());
    // A captured copy reads the memory at each replay of its graph.
    auto capture = cudaStreamCaptureStatusNone;
    if (!result_of(cudaStreamIsCapturing(cuda_stream.stream(), &capture)) || capture != cudaStreamCaptureStatusNone)
      return false;
    auto read = std::find_if(range.reads.begin(), range.reads.end(),
                             [&](const StreamRead& known) { return known.stream == stream; });
    if (read == range.reads.end()) {
      cudaEvent_t event = nullptr;
      if (!result_of(cudaEventCreateWithFlags(&event, cudaEventDisableTiming))) return false;
      read = range.reads.insert(range.reads.end(), {.stream = stream, .event = event});
    }
    if (!result_of(cudaEventRecord(read->event, cuda_stream.stream()))) return false;
    read->is_in_progress = true;
    return true;
  }

  Mutex mutex_;
  std::map<std::byte*, Range> ranges_ PENSTOCK_GUARDED_BY(mutex_);
};

// One per process, like torch's allocator; never destroyed, because tensors may outlive static objects.
HostReads& host_reads() {
  static HostReads* const reads = std::make_unique<HostReads>().release();
  return *reads;
}

// ---- The allocator in front of torch's. It forwards all virtual functions of HostAllocator in the torch version used;
// a
// torch with more virtual functions than these needs more here.

class ReportingAllocator : public at::HostAllocator {
 public:
  explicit ReportingAllocator(at::HostAllocator& torchs) : torchs_(torchs) {}

  bool record_event(void* pointer, void* context, c10::Stream stream) override {
    const auto is_ours =
        guarded([&]() -> Result<bool> { return host_reads().note(static_cast<std::byte*>(pointer), stream); });
    return (is_ours && is_ours.value()) || torchs_.record_event(pointer, context, stream);
  }

  at::DataPtr allocate(size_t bytes) override { return torchs_.allocate(bytes); }
  at::DeleterFnPtr raw_deleter() const override { return torchs_.raw_deleter(); }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return torchs_.is_simple_data_ptr(data); }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    torchs_.copy_data(target, source, bytes);
  }
  void empty_cache() override { torchs_.empty_cache(); }
  at::HostStats get_stats() override { return torchs_.get_stats(); }
  void reset_accumulated_stats() override { torchs_.reset_accumulated_stats(); }
  void reset_peak_stats() override { torchs_.reset_peak_stats(); }
  void begin_allocate_to_pool(c10::MempoolId_t pool, std::function<bool(c10::Stream)> filter) override {
    torchs_.begin_allocate_to_pool(pool, std::move(filter));
  }
  void end_allocate_to_pool(c10::MempoolId_t pool) override { torchs_.end_allocate_to_pool(pool); }
  void release_pool(c10::MempoolId_t pool) override { torchs_.release_pool(pool); }

 protected:
  at::HostAllocator& torchs_;
};

template <typename Allocator>
concept RecordsHistory = requires(Allocator& allocator) {
  allocator.get_segments();
};
template <typename Allocator>
concept KnowsRegistrations = requires(Allocator& allocator) {
  allocator.record_external_unregister(nullptr);
};

template <typename Base, bool kIsThere>
struct WithHistory : Base {
  using Base::Base;
};
template <typename Base>
struct WithHistory<Base, true> : Base {
  using Base::Base;
  void record_history(bool is_enabled, c10::CachingDeviceAllocator::CreateContextFn recorder, size_t entry_count_max,
                      c10::CachingDeviceAllocator::RecordContext when, bool clears) override {
    this->torchs_.record_history(is_enabled, recorder, entry_count_max, when, clears);
  }
  bool is_history_enabled() const override { return this->torchs_.is_history_enabled(); }
  decltype(std::declval<Base&>().get_segments()) get_segments() override { return this->torchs_.get_segments(); }
  decltype(std::declval<Base&>().get_traces()) get_traces() override { return this->torchs_.get_traces(); }
};

template <typename Base, bool kIsThere>
struct WithRegistrations : Base {
  using Base::Base;
};
template <typename Base>
struct WithRegistrations<Base, true> : Base {
  using Base::Base;
  void record_external_register(void* base, size_t bytes) override {
    this->torchs_.record_external_register(base, bytes);
  }
  void record_external_unregister(void* base) override { this->torchs_.record_external_unregister(base); }
};

using FrontAllocator = WithRegistrations<WithHistory<ReportingAllocator, RecordsHistory<at::HostAllocator>>,
                                         KnowsRegistrations<at::HostAllocator>>;

// Installs an allocator in front of torch's, once per process, and returns whether torch uses it.
bool try_stand_in_front() {
  static const bool is_in_front = [] {
    auto* const front =
        std::make_unique<FrontAllocator>(*at::getHostAllocator(at::kCUDA)).release();  // never destroyed
    at::setHostAllocator(at::kCUDA, front, std::numeric_limits<uint8_t>::max());
    return at::getHostAllocator(at::kCUDA) == front;
  }();
  return is_in_front;
}

// A process of one rank uses one device; registering memory must not create a context on another.
class OnUsedDevice {
 public:
  OnUsedDevice() : guard_(c10::cuda::getDeviceIndexWithPrimaryContext()) {}

 private:
  const c10::cuda::OptionalCUDAGuard guard_;
};

class CudaWatchedMemory final : public WatchedMemory {
 public:
  bool register_memory(std::span<std::byte> memory) override {
    return static_cast<bool>(guarded([&]() -> Result<void> {
      at::globalContext().lazyInitDevice(at::kCUDA);  // until then torch treats no memory as pinned
      const OnUsedDevice guard;
      if (auto registered = result_of(cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable));
          !registered)
        return registered;
      host_reads().add(memory);
      return {};
    }));
  }

  void unregister_memory(std::byte* base) override {
    static_cast<void>(guarded([&]() -> Result<void> {
      const OnUsedDevice guard;
      host_reads().remove(base);
      return result_of(cudaHostUnregister(base));
    }));
  }

  Reads reads(std::byte* base) override { return look(base, /*waits=*/false); }
  Reads wait_for_reads(std::byte* base) override { return look(base, /*waits=*/true); }

 private:
  static Reads look(std::byte* base, bool waits) {
    const auto reads = guarded([&]() -> Result<Reads> { return host_reads().look(base, waits); });
    return reads ? reads.value() : Reads::kUnknown;
  }
};

}  // namespace

Result<std::unique_ptr<WatchedMemory>> make_cuda_watched_memory() {
  if (c10::cuda::device_count() == 0) return Fault{Errc::kUnsupported, "this machine has no CUDA device"};
  const auto is_in_front = guarded([]() -> Result<bool> { return try_stand_in_front(); });
  if (!is_in_front) return is_in_front.error();
  if (!is_in_front.value())
    return Fault{Errc::kUnsupported, "another library has replaced torch's pinned memory allocator"};
  return std::unique_ptr<WatchedMemory>(std::make_unique<CudaWatchedMemory>());
}

}  // namespace penstock::device
