// SPDX-License-Identifier: Apache-2.0
#include "loader/copy_stage.h"

#include <utility>

#include "base/mutex.h"

namespace penstock::loader {
namespace {

// Keeps memory until the process ends, and from its destructors: what a lost device reads, and how long, is not known.
// No owner lives as long as that, so this is global.
void keep_for_good(std::vector<at::Tensor> sources) {
  static Mutex mutex;
  static auto* const kept = std::make_unique<std::vector<std::vector<at::Tensor>>>().release();
  const MutexLock lock(mutex);
  kept->push_back(std::move(sources));
}

}  // namespace

CopyStage::CopyStage(std::unique_ptr<Device> device) : device_(std::move(device)), registrations_(*device_) {}

CopyStage::~CopyStage() {
  if (!copies_.empty()) settle();
}

Result<void> CopyStage::begin(Batch& batch) {
  if (!loss_.empty()) return loss();
  if (auto mapped = batch.map_for_copy(); !mapped) return mapped;
  const std::vector<at::Tensor>& hosts = batch.tensors();
  auto devices = allocate(hosts, batch.bytes());
  if (!devices) return devices.error();
  // An arena that is used once is not worth registering, which takes longer than its copy.
  const bool is_transient = (batch.descriptor().flags & wire::kDescriptorTransient) != 0;
  if (batch.lease() && !is_transient) registrations_.add(batch.lease(), batch.descriptor().slab_bytes);
  Copy copy{.event = nullptr, .lease = batch.lease(), .sources = hosts};
  if (auto started = start_copies(hosts, devices.value()); !started) return give_up(std::move(copy), started.error());
  // A stage that widens numbers on the device comes next in the chain. It works on the same stream and records an event
  // of its own.
  auto event = device_->record();
  if (!event) return give_up(std::move(copy), event.error());
  copy.event = std::move(event).value();
  batch.set_ready_event(copy.event);
  copies_.push_back(std::move(copy));
  batch.replace_tensors(std::move(devices).value());
  return {};
}

Result<std::vector<at::Tensor>> CopyStage::allocate(const std::vector<at::Tensor>& hosts, uint64_t batch_bytes) {
  std::vector<at::Tensor> devices;
  devices.reserve(hosts.size());
  for (const at::Tensor& host : hosts) {
    auto made = device_->allocate(host);
    if (!made) {
      return Error{made.error().code, "allocating memory on " + device_->name() + " for a batch of " +
                                          std::to_string(batch_bytes) + " bytes failed: " + made.error().message};
    }
    devices.push_back(std::move(made).value());
  }
  return devices;
}

Result<void> CopyStage::start_copies(const std::vector<at::Tensor>& hosts, const std::vector<at::Tensor>& devices) {
  for (size_t index = 0; index < hosts.size(); ++index) {
    PENSTOCK_ASSERT(hosts[index].storage().nbytes() == devices[index].storage().nbytes(),
                    "a tensor on the device has another size than its source");
    if (hosts[index].storage().nbytes() == 0) continue;
    if (auto started = device_->copy(hosts[index], devices[index]); !started) return started.error();
  }
  return {};
}

// Some of a batch's copies may be under way, and no event says when they are over.
Error CopyStage::give_up(Copy copy, const Error& cause) {
  copies_.push_back(std::move(copy));
  settle();
  if (!loss_.empty()) return loss();
  return {Errc::kFailed, "copying a batch to " + device_->name() + " failed: " + cause.message};
}

Result<void> CopyStage::finish(Batch& batch) {
  const std::shared_ptr<DeviceEvent> event = batch.take_ready_event();
  if (!event) return {};
  auto handed_over = device_->hand_over(*event, batch.tensors());
  if (handed_over) return {};
  return Error{Errc::kFailed, "waiting for the copy of a batch to " + device_->name() +
                                  " failed: " + handed_over.error().message +
                                  "; if the device is lost to this process, start the program again"};
}

size_t CopyStage::reclaim() {
  bool is_unsure = false;
  std::erase_if(copies_, [&](const Copy& copy) {
    const auto is_over = device_->is_over(*copy.event);
    is_unsure = is_unsure || !is_over;
    return is_over && is_over.value();
  });
  if (is_unsure) settle();
  return copies_.size();
}

// An error of a query says nothing about the copies, so they are waited for. Only when that fails, too, the device is
// lost.
void CopyStage::settle() {
  if (const auto waited = device_->wait_for_all(); !waited) return lose(waited.error().message);
  copies_.clear();
}

void CopyStage::lose(const std::string& cause) {
  loss_ = cause;
  for (Copy& copy : copies_) {
    if (copy.lease) {
      copy.lease->retire();
      ++retired_count_;
    }
    keep_for_good(std::move(copy.sources));
  }
  copies_.clear();
}

Error CopyStage::loss() const {
  return {Errc::kFailed, device_->name() + " is lost to this process (" + loss_ +
                             "), so no batch can be copied to it; look for the cause in the first error of a CUDA "
                             "call, and start the program again"};
}

}  // namespace penstock::loader
