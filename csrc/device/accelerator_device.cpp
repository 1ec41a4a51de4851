// SPDX-License-Identifier: Apache-2.0
#include "device/accelerator_device.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>
#include <utility>

#include "device/cuda_device.h"
#include "device/device.h"

namespace penstock::device {
namespace {

class AcceleratorEvent final : public DeviceEvent {
 public:
  explicit AcceleratorEvent(c10::DeviceType type) : event(type) {}

  c10::Event event;
};

class Accelerator final : public Device {
 public:
  Accelerator(c10::Device device, c10::Stream stream) : device_(device), guard_(device.type()), stream_(stream) {}

  std::string name() const override { return device_.str(); }

  // Torch's backends have no common way to register memory that they did not allocate.
  bool register_memory(std::span<std::byte>) override { return false; }
  void unregister_memory(std::byte*) override {}

  Result<at::Tensor> allocate(const at::Tensor& like) override {
    return on_stream([&]() -> Result<at::Tensor> {
      return at::empty_strided(like.sizes(), like.strides(), like.options().device(device_));
    });
  }

  Result<void> copy(const at::Tensor& host, const at::Tensor& on_device) override {
    return on_stream([&]() -> Result<void> {
      on_device.copy_(host, /*non_blocking=*/true);
      return {};
    });
  }

  bool can_widen() const override { return false; }
  Result<uint64_t> scratch_bytes(const wire::Widening&) override { return no_kernels(); }
  Result<void> widen(const wire::Widening&, const at::Tensor&, const at::Tensor&, const at::Tensor&) override {
    return no_kernels();
  }

  Result<std::shared_ptr<DeviceEvent>> record() override {
    return on_stream([&]() -> Result<std::shared_ptr<DeviceEvent>> {
      auto made = std::make_shared<AcceleratorEvent>(device_.type());
      made->event.record(stream_);
      return std::shared_ptr<DeviceEvent>(std::move(made));
    });
  }

  Result<bool> is_over(const DeviceEvent& event) override {
    return caught([&]() -> Result<bool> { return of(event).query(); });
  }

  Result<void> wait_for(const DeviceEvent& event) override {
    return caught([&]() -> Result<void> {
      of(event).synchronize();
      return {};
    });
  }

  Result<void> wait_for_all() override {
    return caught([&]() -> Result<void> {
      guard_.synchronizeStream(stream_);
      return {};
    });
  }

  Result<void> hand_over(const DeviceEvent& event, std::span<const at::Tensor> tensors) override {
    return caught([&]() -> Result<void> {
      const c10::Stream current = guard_.getStream(device_);
      of(event).block(current);
      for (const at::Tensor& tensor : tensors)
        if (tensor.device() == device_) guard_.recordDataPtrOnStream(tensor.storage().data_ptr(), current);
      return {};
    });
  }

 private:
  static const c10::Event& of(const DeviceEvent& event) { return static_cast<const AcceleratorEvent&>(event).event; }

  template <typename Call>
  auto on_stream(Call call) -> decltype(call()) {
    return caught([&] {
      const c10::StreamGuard guard(stream_);
      return call();
    });
  }

  static Fault no_kernels() { return {Errc::kUnsupported, "tensors can be decompressed only on CUDA devices"}; }

  c10::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream stream_;
};

}  // namespace

Result<std::unique_ptr<Device>> open_accelerator(c10::Device device) {
  const auto refuse = [&](const std::string& why) {
    return Fault{Errc::kUnsupported,
                 "device " + device.str() + " was requested, but " + why + "; pass device=None or an existing device"};
  };
  if (!c10::impl::hasDeviceGuardImpl(device.type())) return refuse("torch has no backend for it");
  const c10::impl::VirtualGuardImpl guard(device.type());
  const int device_count = guard.deviceCount();
  if (!device.has_index() || device.index() >= device_count)
    return refuse("torch finds " + std::to_string(device_count) + " such devices");
  const auto stream = caught([&]() -> Result<c10::Stream> { return guard.getStreamFromGlobalPool(device); });
  if (!stream) return refuse("creating a stream on it failed: " + stream.error().message);
  return std::unique_ptr<Device>(std::make_unique<Accelerator>(device, stream.value()));
}

std::optional<c10::Device> device_named(const std::optional<std::string>& name) {
  return name ? std::optional(c10::Device(*name)) : std::nullopt;
}

Result<std::unique_ptr<Device>> open_device(c10::Device device) {
  return device.is_cuda() ? open_cuda_device(device.index()) : open_accelerator(device);
}

}  // namespace penstock::device
