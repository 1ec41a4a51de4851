// SPDX-License-Identifier: Apache-2.0
#include "loader/copy_stage.h"

#include <ATen/ops/empty.h>

#include <utility>

namespace penstock::loader {

CopyStage::CopyStage(std::unique_ptr<Device> device)
    : device_(std::move(device)), takes_narrow_(device_->can_widen()), registrations_(*device_) {}

CopyStage::~CopyStage() {
  if (!copies_.empty()) settle();
}

Result<void> CopyStage::begin(Batch& batch) {
  if (!loss_.empty()) return loss();
  if (auto mapped = batch.map_for_copy(); !mapped) return mapped;
  const std::vector<at::Tensor> sources = batch.copy_sources();
  auto rooms = allocate(batch, sources);
  if (!rooms) return rooms.error();
  // An arena that is used once is not worth registering, which takes longer than its copy.
  const bool is_transient = (batch.descriptor().flags & wire::kDescriptorTransient) != 0;
  if (batch.lease() && !is_transient) registrations_.add(batch.lease(), batch.descriptor().slab_bytes);
  Copy copy{.event = nullptr, .lease = batch.lease(), .sources = sources};
  if (auto started = start(batch, sources, rooms.value()); !started) return give_up(std::move(copy), started.error());
  auto event = device_->record();
  if (!event) return give_up(std::move(copy), event.error());
  copy.event = std::move(event).value();
  batch.set_ready_event(copy.event);
  copies_.push_back(std::move(copy));
  std::vector<at::Tensor> tensors;
  tensors.reserve(rooms.value().size());
  for (Room& room : rooms.value()) tensors.push_back(std::move(room.tensor));
  batch.replace_tensors(std::move(tensors));
  return {};
}

Result<std::vector<CopyStage::Room>> CopyStage::allocate(const Batch& batch, const std::vector<at::Tensor>& sources) {
  std::vector<Room> rooms;
  rooms.reserve(sources.size());
  for (size_t index = 0; index < sources.size(); ++index) {
    auto made = allocate_one(batch, index, sources[index]);
    if (!made) {
      return Fault{made.error().code, "allocating memory on " + device_->name() + " for a batch of " +
                                          std::to_string(batch.bytes() + batch.wide_bytes()) +
                                          " bytes failed: " + made.error().message};
    }
    rooms.push_back(std::move(made).value());
  }
  return rooms;
}

Result<CopyStage::Room> CopyStage::allocate_one(const Batch& batch, size_t index, const at::Tensor& source) {
  Room room;
  const wire::Widening* const widening = batch.widening(index);
  auto tensor = device_->allocate(widening != nullptr ? batch.meta(index) : source);
  if (!tensor) return tensor.error();
  room.tensor = std::move(tensor).value();
  if (widening == nullptr) return room;
  auto narrow = device_->allocate(source);
  if (!narrow) return narrow.error();
  room.narrow = std::move(narrow).value();
  const auto scratch_bytes = device_->scratch_bytes(*widening);
  if (!scratch_bytes) return scratch_bytes.error();
  if (scratch_bytes.value() == 0) return room;
  const auto scratch_size = static_cast<int64_t>(scratch_bytes.value());
  auto scratch = device_->allocate(at::empty({scratch_size}, source.options().device(at::kMeta)));
  if (!scratch) return scratch.error();
  room.scratch = std::move(scratch).value();
  return room;
}

Result<void> CopyStage::start(const Batch& batch, const std::vector<at::Tensor>& sources,
                              const std::vector<Room>& rooms) {
  for (size_t index = 0; index < sources.size(); ++index) {
    const Room& room = rooms[index];
    const at::Tensor& target = room.narrow.defined() ? room.narrow : room.tensor;
    PENSTOCK_ASSERT(sources[index].storage().nbytes() == target.storage().nbytes(),
                    "a tensor on the device has another size than its source");
    if (sources[index].storage().nbytes() == 0) continue;
    if (auto started = device_->copy(sources[index], target); !started) return started.error();
    if (!room.narrow.defined()) continue;
    const wire::Widening& widening = *batch.widening(index);
    PENSTOCK_ASSERT(room.tensor.storage().nbytes() == widening.plain_bytes(), "a tensor is widened to another size");
    if (auto started = device_->widen(widening, room.narrow, room.scratch, room.tensor); !started)
      return started.error();
  }
  return {};
}

// Some of a batch's copies may be under way, and no event says when they are over.
Fault CopyStage::give_up(Copy copy, const Fault& cause) {
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
  return Fault{Errc::kFailed, "waiting for the copy of a batch to " + device_->name() +
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
    keep_for_good(std::make_shared<std::vector<at::Tensor>>(std::move(copy.sources)));
  }
  copies_.clear();
}

Fault CopyStage::loss() const {
  return {Errc::kFailed, device_->name() + " is lost to this process (" + loss_ +
                             "), so no batch can be copied to it; look for the cause in the first error of a CUDA "
                             "call, and start the program again"};
}

}  // namespace penstock::loader
