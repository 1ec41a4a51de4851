// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "memory.h"
#include "streams.h"

namespace simgpu {
namespace {

thread_local c10::DeviceIndex current_index = 0;

// Draws from a generator of the CPU, so that the same seed gives the CPU's numbers.
class SimulatedGenerator final : public c10::GeneratorImpl {
 public:
  explicit SimulatedGenerator(c10::DeviceIndex device, at::Generator drawn = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        drawn_(std::move(drawn)) {}

  void set_current_seed(uint64_t seed) override { drawn_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { drawn_.set_offset(offset); }
  uint64_t get_offset() const override { return drawn_.get_offset(); }
  uint64_t current_seed() const override { return drawn_.current_seed(); }
  uint64_t seed() override { return drawn_.seed(); }
  void set_state(const c10::TensorImpl& state) override { drawn_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return drawn_.unsafeGetGeneratorImpl()->get_state();
  }

  at::Generator& drawn() { return drawn_; }

 private:
  SimulatedGenerator* clone_impl() const override {
    return std::make_unique<SimulatedGenerator>(device().index(), drawn_.clone()).release();  // torch owns it
  }

  at::Generator drawn_;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kPrivateUse1; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(current_index); }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDeviceCount) current_index = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDeviceCount; }

  c10::Stream getStream(c10::Device device) const override { return Streams::get().current(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return Streams::default_of(index_of(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return Streams::get().make(index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return Streams::get().make(index_of(device)); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return Streams::get().exchange(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    return Streams::get().is_over(Streams::get().end_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override { Streams::get().finish(stream); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { Streams::get().finish_all(device); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = std::make_unique<Recorded>().release();  // until destroyEvent()
    *recorded(*event) = Streams::get().record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Streams::get().wait_for(stream, recorded(event)->mark);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Streams::get().is_over(recorded(event)->mark);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Streams::get().finish(recorded(event)->mark);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    const std::unique_ptr<Recorded> owner(recorded(event));
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    synchronizeEvent(first);
    synchronizeEvent(second);
    const std::chrono::duration<double, std::milli> elapsed =
        *recorded(second)->reached_at - *recorded(first)->reached_at;
    return elapsed.count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.get(), stream);
  }

 private:
  static Recorded* recorded(void* event) { return static_cast<Recorded*>(event); }
  static c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_index; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return Streams::get().is_used(); }
  void init() const override { Streams::get().check(); }

  c10::DeviceIndex deviceCount() const override { return kDeviceCount; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = current_index;
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_index : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<SimulatedGenerator>(device < 0 ? current_index : device);
  }

  at::Device getDeviceFromPtr(void* pointer) const override { return device_at(device_of(pointer)); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(at::kPrivateUse1); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr data = allocate(storage.device().index(), bytes);
    Streams::get().finish(Streams::get().current(storage.device().index()));
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) std::memcpy(on_host(data.get()), on_host(storage.data()), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

[[maybe_unused]] const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(std::make_unique<Hooks>().release());  // torch keeps it
  c10::SetAllocator(c10::kPrivateUse1, &device_allocator());
  at::setHostAllocator(at::kPrivateUse1, &pinned_allocator());
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

c10::DeviceIndex current_device() { return current_index; }

void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kDeviceCount, "simgpu error: invalid device ordinal ", static_cast<int>(device),
              "; there are ", static_cast<int>(kDeviceCount));
  current_index = device;
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* const generators = [] {
    auto made = std::make_unique<std::vector<at::Generator>>();
    for (c10::DeviceIndex index = 0; index < kDeviceCount; ++index)
      made->push_back(at::make_generator<SimulatedGenerator>(index));
    return made.release();
  }();
  return generators->at(static_cast<size_t>(device));
}

at::Generator& drawn_from(const at::Generator& generator) {
  return static_cast<SimulatedGenerator*>(generator.unsafeGetGeneratorImpl())->drawn();
}

}  // namespace simgpu
