// SPDX-License-Identifier: Apache-2.0
#include "loader/copy_stage.h"

#include <ATen/ops/empty.h>

#include <utility>

namespace penstock::loader {

CopyStage::CopyStage(std::unique_ptr<device::Device> device)
    : device_(std::move(device)), takes_narrow_(device_->can_widen()), registrations_(*device_), copies_(*device_) {}

Result<void> CopyStage::begin(Batch& batch) {
  if (auto there = copies_.check(); !there) return there;
  if (auto mapped = batch.map_for_copy(); !mapped) return mapped;
  const std::vector<at::Tensor> sources = batch.copy_sources();
  auto rooms = allocate(batch, sources);
  if (!rooms) return rooms.error();
  // A single-use arena is not registered: that takes longer than its copy.
  if (batch.lease() && !batch.facts().is_transient) registrations_.add(batch.lease(), batch.facts().slab_bytes);
  CopySources read{.lease = batch.lease(), .tensors = sources};
  if (auto started = start(batch, sources, rooms.value()); !started)
    return copies_.give_up(std::move(read), started.error());
  auto event = copies_.add(std::move(read));
  if (!event) return event.error();
  batch.set_ready_event(std::move(event).value());
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
  if (batch.is_withheld(index)) return Room{.tensor = source, .narrow = {}, .scratch = {}};
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
    if (batch.is_withheld(index)) continue;
    const Room& room = rooms[index];
    const at::Tensor& target = room.narrow.defined() ? room.narrow : room.tensor;
    PENSTOCK_ASSERT(sources[index].storage().nbytes() == target.storage().nbytes(),
                    "a tensor on the device has another size than its source");
    if (sources[index].storage().nbytes() == 0) continue;
    if (auto started = device_->copy(sources[index], target); !started) return started.error();
    if (!room.narrow.defined()) continue;
    const wire::Widening& widening = *batch.widening(index);
    PENSTOCK_ASSERT(room.tensor.storage().nbytes() == widening.plain_bytes(),
                    "a tensor is decompressed to another size");
    if (auto started = device_->widen(widening, room.narrow, room.scratch, room.tensor); !started)
      return started.error();
  }
  return {};
}

Result<void> CopyStage::finish(Batch& batch) {
  const std::shared_ptr<device::DeviceEvent> event = batch.take_ready_event();
  if (!event) return {};
  std::vector<at::Tensor> copied;
  for (const at::Tensor& tensor : batch.tensors())
    if (!tensor.is_meta()) copied.push_back(tensor);
  auto handed_over = device_->hand_over(*event, copied);
  if (handed_over) return {};
  return Fault{Errc::kFailed, "waiting for the copy of a batch to " + device_->name() +
                                  " failed: " + handed_over.error().message +
                                  "; if the device is no longer usable in this process, restart the program"};
}

}  // namespace penstock::loader
