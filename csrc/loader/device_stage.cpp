// SPDX-License-Identifier: Apache-2.0
#include "loader/device_stage.h"

#ifdef PENSTOCK_WITH_CUDA

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty_strided.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>

namespace penstock::loader {
namespace {

// Slabs that are registered with the driver. Registering is slow, so it is done once for a slab and again only when the
// slab has grown; a slab that cannot be registered is copied from as it is. A view is shared so that its memory stays
// mapped for as long as the driver knows it, and forgotten once nobody else refers to it.
class Registrations {
 public:
  ~Registrations() {
    for (const auto& [view, slabs] : arenas_) unregister(slabs);
  }

  void add(const c10::intrusive_ptr<SlabLease>& lease, uint64_t bytes) {
    std::erase_if(arenas_, [](const auto& arena) {
      const bool is_unused = arena.first.use_count() == 1;
      if (is_unused) unregister(arena.second);
      return is_unused;
    });
    Slab& slab = arenas_[lease->shared_view()][lease->data()];
    if (bytes <= slab.bytes || slab.has_failed) return;
    if (slab.bytes > 0) cudaHostUnregister(lease->data());
    slab.bytes = 0;
    if (cudaHostRegister(lease->data(), bytes, cudaHostRegisterPortable) != cudaSuccess) {
      cudaGetLastError();  // clears the error, which would surface in an unrelated call of torch
      slab.has_failed = true;
      return;
    }
    slab.bytes = bytes;
  }

 private:
  struct Slab {
    uint64_t bytes = 0;
    bool has_failed = false;
  };
  using Slabs = std::map<std::byte*, Slab>;

  static void unregister(const Slabs& slabs) {
    for (const auto& [base, slab] : slabs) {
      if (slab.bytes > 0) cudaHostUnregister(base);
    }
  }

  std::map<std::shared_ptr<shm::ArenaView>, Slabs> arenas_;
};

class CudaStage final : public BatchStage {
 public:
  explicit CudaStage(c10::DeviceIndex device)
      : device_(device), stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device)) {}

  ~CudaStage() override {
    const c10::cuda::CUDAGuard guard(device_);
    static_cast<void>(
        cudaStreamSynchronize(stream_.stream()));  // an error of the device is reported by the trainer's calls
  }

  Result<void> begin(Batch& batch) override {
    if (batch.raises()) return {};
    try {
      const c10::cuda::CUDAStreamGuard guard(stream_);
      const auto lease = batch.lease();
      // An arena that is used once is not worth registering, which takes longer than its copy.
      const bool is_transient = (batch.descriptor().flags & wire::kDescriptorTransient) != 0;
      if (lease && !is_transient) registrations_.add(lease, batch.descriptor().slab_bytes);
      std::vector<at::Tensor> hosts = batch.tensors();
      std::vector<at::Tensor> devices;
      devices.reserve(hosts.size());
      for (const at::Tensor& host : hosts) {
        devices.push_back(
            at::empty_strided(host.sizes(), host.strides(), host.options().device(at::Device(at::kCUDA, device_))));
        const size_t bytes = host.storage().nbytes();
        if (bytes == 0) continue;
        const cudaError_t status = cudaMemcpyAsync(devices.back().mutable_data_ptr(), host.const_data_ptr(), bytes,
                                                   cudaMemcpyHostToDevice, stream_.stream());
        if (status != cudaSuccess) return failure(cudaGetErrorString(status));
      }
      Copy copy{.event = std::make_shared<at::cuda::CUDAEvent>(), .sources = std::move(hosts)};
      copy.event->record(stream_);
      batch.set_ready_event(copy.event);
      batch.replace_tensors(std::move(devices));
      copies_.push_back(std::move(copy));
    } catch (const c10::Error& error) {
      return failure(error.what_without_backtrace());
    }
    return {};
  }

  void finish(Batch& batch) override {
    auto event = std::static_pointer_cast<at::cuda::CUDAEvent>(batch.ready_event());
    if (!event) return;
    const c10::cuda::CUDAGuard guard(device_);
    const auto current = c10::cuda::getCurrentCUDAStream(device_);
    event->block(current);
    for (const at::Tensor& tensor : batch.tensors()) {
      c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), current);
    }
  }

  size_t reclaim() override {
    try {
      while (!copies_.empty() && copies_.front().event->query()) copies_.pop_front();
    } catch (const c10::Error&) {
      // The device is lost to this process, by a fault in one of the user's kernels, say. Nothing is being read any
      // more, and the trainer's own calls report the cause.
      copies_.clear();
    }
    return copies_.size();
  }

 private:
  // The sources of one copy: the host tensors hold the slab's lease until the event is over.
  struct Copy {
    std::shared_ptr<at::cuda::CUDAEvent> event;  // shared with the batch, which the trainer may hold longer
    std::vector<at::Tensor> sources;
  };

  // Copies that were begun before the failure still read the slab, which goes back when the batch is dropped.
  Error failure(const std::string& cause) const {
    static_cast<void>(cudaStreamSynchronize(stream_.stream()));
    return {Errc::kFailed, "copying a batch to cuda:" + std::to_string(device_) + " failed: " + cause};
  }

  c10::DeviceIndex device_;
  c10::cuda::CUDAStream stream_;
  Registrations registrations_;
  std::deque<Copy> copies_;
};

}  // namespace

Result<std::unique_ptr<BatchStage>> make_cuda_stage(int device_index) {
  const int device_count = c10::cuda::device_count();
  if (device_index < 0 || device_index >= device_count) {
    return Error{Errc::kUnsupported, "device cuda:" + std::to_string(device_index) +
                                         " was asked for, and this machine has " + std::to_string(device_count) +
                                         " CUDA devices; pass device=None or a device that is there"};
  }
  return std::unique_ptr<BatchStage>(std::make_unique<CudaStage>(static_cast<c10::DeviceIndex>(device_index)));
}

}  // namespace penstock::loader

#else

namespace penstock::loader {

Result<std::unique_ptr<BatchStage>> make_cuda_stage(int device_index) {
  return Error{Errc::kUnsupported,
               "device cuda:" + std::to_string(device_index) +
                   " was asked for, and this build of penstock has no CUDA; install a CUDA build of "
                   "torch and nvcc, then build penstock again, or pass device=None"};
}

}  // namespace penstock::loader

#endif
