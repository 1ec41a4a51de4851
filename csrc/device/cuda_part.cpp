// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_part.h"

#include <ATen/ops/empty_strided.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <array>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "device/cuda_calls.h"
#include "device/cuda_host_reads.h"
#ifdef PENSTOCK_WITH_KERNELS
#include "device/widen_kernels.h"
#endif

namespace penstock::device {
namespace {

class CudaEvent final : public DeviceEvent {
 public:
  // On the current device.
  static Result<std::shared_ptr<CudaEvent>> record(cudaStream_t stream) {
    cudaEvent_t event = nullptr;
    if (auto made = result_of(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)); !made) return made.error();
    auto owner = std::make_shared<CudaEvent>(event);
    if (auto recorded = result_of(cudaEventRecord(event, stream)); !recorded) return recorded.error();
    return owner;
  }

  explicit CudaEvent(cudaEvent_t event) : event_(event) {}
  ~CudaEvent() override {
    const Relaxed relaxed;
    static_cast<void>(result_of(cudaEventDestroy(event_)));
  }

  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_;
};

// One stream per device for the life of the process, instead of one per loader: torch's allocator keeps freed memory
// for the stream that it was allocated on, so the memory of every destroyed loader would lie idle. The stream is not
// one of torch's 32 either, which are assigned in turn: a program that captures on the same stream would capture these
// copies.
Result<cudaStream_t> copy_stream(c10::DeviceIndex index) {
  static Mutex mutex;
  static std::array<cudaStream_t, C10_COMPILE_TIME_MAX_GPUS> streams{};
  const MutexLock lock(mutex);
  cudaStream_t& stream = streams.at(static_cast<size_t>(index));
  if (stream == nullptr) {
    if (auto made = result_of(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); !made) return made.error();
  }
  return stream;
}

class CudaDevice final : public Device {
 public:
  CudaDevice(c10::DeviceIndex index, cudaStream_t stream)
      : index_(index), stream_(c10::cuda::getStreamFromExternal(stream, index)), can_widen_(try_kernels()) {}

  std::string name() const override { return "cuda:" + std::to_string(index_); }

  Result<at::Tensor> allocate(const at::Tensor& like) override {
    return on_device([&]() -> Result<at::Tensor> {
      return at::empty_strided(like.sizes(), like.strides(), like.options().device(at::Device(at::kCUDA, index_)));
    });
  }

  bool register_memory(std::span<std::byte> memory) override {
    return static_cast<bool>(
        on_device([&] { return result_of(cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable)); }));
  }

  void unregister_memory(std::byte* base) override {
    static_cast<void>(on_device([&] { return result_of(cudaHostUnregister(base)); }));
  }

  Result<void> copy(const at::Tensor& host, const at::Tensor& on_device_tensor) override {
    return on_device([&] {
      return result_of(cudaMemcpyAsync(on_device_tensor.mutable_data_ptr(), host.const_data_ptr(),
                                       host.storage().nbytes(), cudaMemcpyHostToDevice, stream_.stream()));
    });
  }

  bool can_widen() const override { return can_widen_; }

#ifdef PENSTOCK_WITH_KERNELS

  Result<uint64_t> scratch_bytes(const wire::Widening& widening) override {
    return on_device([&]() -> Result<uint64_t> {
      uint64_t bytes = 0;
      if (auto asked = result_of(widen_scratch_bytes(widening, bytes)); !asked) return asked.error();
      return bytes;
    });
  }

  Result<void> widen(const wire::Widening& widening, const at::Tensor& narrow, const at::Tensor& scratch,
                     const at::Tensor& target) override {
    return on_device([&] {
      WidenMemory memory{.narrow = static_cast<const std::byte*>(narrow.const_data_ptr()),
                         .target = static_cast<std::byte*>(target.mutable_data_ptr())};
      if (scratch.defined()) {
        memory.scratch = static_cast<std::byte*>(scratch.mutable_data_ptr());
        memory.scratch_bytes = scratch.storage().nbytes();
      }
      return result_of(start_widening(widening, memory, stream_.stream()));
    });
  }

#else

  Result<uint64_t> scratch_bytes(const wire::Widening&) override { return no_kernels(); }
  Result<void> widen(const wire::Widening&, const at::Tensor&, const at::Tensor&, const at::Tensor&) override {
    return no_kernels();
  }

#endif

  Result<std::shared_ptr<DeviceEvent>> record() override {
    return on_device([&]() -> Result<std::shared_ptr<DeviceEvent>> {
      auto event = CudaEvent::record(stream_.stream());
      if (!event) return event.error();
      return std::shared_ptr<DeviceEvent>(std::move(event).value());
    });
  }

  Result<bool> is_over(const DeviceEvent& event) override {
    return on_device([&]() -> Result<bool> {
      const cudaError_t status = cudaEventQuery(of_cuda(event));
      if (status == cudaErrorNotReady) {
        cudaGetLastError();
        return false;
      }
      if (auto queried = result_of(status); !queried) return queried.error();
      return true;
    });
  }

  Result<void> wait_for(const DeviceEvent& event) override {
    return guarded([&] { return result_of(cudaEventSynchronize(of_cuda(event))); });
  }

  Result<void> wait_for_all() override {
    return on_device([&] { return result_of(cudaStreamSynchronize(stream_.stream())); });
  }

  Result<void> hand_over(const DeviceEvent& event, std::span<const at::Tensor> tensors) override {
    return guarded([&]() -> Result<void> {
      const c10::cuda::CUDAGuard guard(index_);
      const auto current = c10::cuda::getCurrentCUDAStream(index_);
      auto status = cudaStreamCaptureStatusNone;
      if (auto asked = result_of(cudaStreamIsCapturing(current.stream(), &status)); !asked) return asked;
      // A captured stream cannot wait for one that is not captured, so the host does.
      auto waits =
          result_of(status == cudaStreamCaptureStatusNone ? cudaStreamWaitEvent(current.stream(), of_cuda(event), 0)
                                                          : cudaEventSynchronize(of_cuda(event)));
      if (!waits) return waits;
      for (const at::Tensor& tensor : tensors)
        c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), current);
      return {};
    });
  }

 private:
  static cudaEvent_t of_cuda(const DeviceEvent& event) { return static_cast<const CudaEvent&>(event).get(); }

  template <typename Call>
  auto on_device(Call call) -> decltype(call()) {
    return guarded([&] {
      const c10::cuda::CUDAStreamGuard guard(stream_);
      return call();
    });
  }

#ifdef PENSTOCK_WITH_KERNELS
  bool try_kernels() {
    return static_cast<bool>(on_device([] { return result_of(try_widen_kernels()); }));
  }
#else
  static bool try_kernels() { return false; }
  static Fault no_kernels() { return {Errc::kUnsupported, "this build of penstock has no kernels"}; }
#endif

  c10::DeviceIndex index_;
  c10::cuda::CUDAStream stream_;
  const bool can_widen_;
};

}  // namespace

Result<std::unique_ptr<Device>> make_cuda_device(int device_index) {
  const int device_count = c10::cuda::device_count();
  if (device_index < 0 || device_index >= device_count) {
    return Fault{Errc::kUnsupported, "device cuda:" + std::to_string(device_index) +
                                         " was requested, but this machine has " + std::to_string(device_count) +
                                         " CUDA devices; pass device=None or an existing device"};
  }
  const auto index = static_cast<c10::DeviceIndex>(device_index);
  const auto stream = guarded([&]() -> Result<cudaStream_t> {
    const c10::cuda::CUDAGuard guard(index);
    return copy_stream(index);
  });
  if (!stream) {
    return Fault{Errc::kUnsupported, "cuda:" + std::to_string(device_index) +
                                         " exists, but creating a stream on it failed: " + stream.error().message +
                                         "; do not use CUDA in a process that was forked after CUDA was used, and "
                                         "check whether other programs can use the device"};
  }
  return std::unique_ptr<Device>(std::make_unique<CudaDevice>(index, stream.value()));
}

bool try_relax_capture(int& mode_before) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  const bool is_relaxed = cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess;
  mode_before = mode;
  return is_relaxed;
}

void restore_capture(int mode_before) {
  auto mode = static_cast<cudaStreamCaptureMode>(mode_before);
  cudaThreadExchangeStreamCaptureMode(&mode);
}

}  // namespace penstock::device

// The only exported symbol of libpenstock_cuda.so.
extern "C" __attribute__((visibility("default"))) const penstock::device::CudaEntries* penstock_cuda_entries() {
  using namespace penstock::device;
  static constexpr CudaEntries entries = {.size = sizeof(CudaEntries),
                                          .built_for = kCudaBuild,
                                          .make_device = &make_cuda_device,
                                          .make_watched_memory = &make_cuda_watched_memory,
                                          .try_relax_capture = &try_relax_capture,
                                          .restore_capture = &restore_capture};
  return &entries;
}
