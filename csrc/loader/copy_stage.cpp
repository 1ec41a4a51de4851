// SPDX-License-Identifier: Apache-2.0
#include "loader/copy_stage.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "loader/batch.h"

namespace penstock::loader {

// The memory has no owner that lives as long, so this is global.
void keep_until_exit(std::shared_ptr<void> memory) {
  static Mutex mutex;
  static auto* const kept = std::make_unique<std::vector<std::shared_ptr<void>>>().release();
  const MutexLock lock(mutex);
  kept->push_back(std::move(memory));
}

SlabRegistrations::~SlabRegistrations() {
  for (const auto& [view, slabs] : arenas_) unregister(slabs);
}

bool SlabRegistrations::add(const c10::intrusive_ptr<SlabLease>& lease, uint64_t bytes) {
  std::erase_if(arenas_, [this](const auto& arena) {
    const bool is_unused = arena.first.use_count() == 1;
    if (is_unused) unregister(arena.second);
    return is_unused;
  });
  Slab& slab = arenas_[lease->shared_view()][lease->data()];
  if (bytes <= slab.bytes || slab.has_failed) return !slab.has_failed;
  if (slab.bytes > 0) registrar_.unregister_memory(lease->data());
  slab.bytes = 0;
  if (registrar_.register_memory({lease->data(), bytes})) {
    slab.bytes = bytes;
  } else {
    slab.has_failed = true;
  }
  return !slab.has_failed;
}

void SlabRegistrations::unregister(const Slabs& slabs) {
  for (const auto& [base, slab] : slabs) {
    if (slab.bytes > 0) registrar_.unregister_memory(base);
  }
}

CopiesInFlight::~CopiesInFlight() {
  if (!copies_.empty()) settle();
}

Result<void> CopiesInFlight::check() const {
  if (!loss_.empty()) return loss();
  return {};
}

Result<std::shared_ptr<device::DeviceEvent>> CopiesInFlight::add(CopySources sources) {
  auto event = device_.record();
  if (!event) return give_up(std::move(sources), event.error());
  copies_.push_back({.event = event.value(), .sources = std::move(sources)});
  return event;
}

Fault CopiesInFlight::give_up(CopySources sources, const Fault& cause) {
  copies_.push_back({.event = nullptr, .sources = std::move(sources)});
  settle();
  if (!loss_.empty()) return loss();
  return {Errc::kFailed, "copying a batch to " + device_.name() + " failed: " + cause.message};
}

size_t CopiesInFlight::reclaim() {
  bool is_unsure = false;
  std::erase_if(copies_, [&](const Copy& copy) {
    const auto is_over = device_.is_over(*copy.event);
    is_unsure = is_unsure || !is_over;
    return is_over && is_over.value();
  });
  if (is_unsure) settle();
  return copies_.size();
}

// A failed query gives no information about the copies, so this waits for them. The device is lost only if that fails,
// too.
void CopiesInFlight::settle() {
  if (const auto waited = device_.wait_for_all(); !waited) return lose(waited.error().message);
  copies_.clear();
}

void CopiesInFlight::lose(const std::string& cause) {
  loss_ = cause;
  for (Copy& copy : copies_) {
    if (copy.sources.lease) {
      copy.sources.lease->retire();
      ++retired_count_;
    }
    keep_until_exit(std::make_shared<std::vector<at::Tensor>>(std::move(copy.sources.tensors)));
  }
  copies_.clear();
}

Fault CopiesInFlight::loss() const {
  return {Errc::kFailed, device_.name() + " is no longer usable in this process (" + loss_ +
                             "), so no batch can be copied to it; find the cause in the first error of a device call, "
                             "and restart the program"};
}

CopyStage::CopyStage(std::unique_ptr<device::Device> device)
    : device_(std::move(device)), takes_narrow_(device_->can_widen()), registrations_(*device_), copies_(*device_) {}

Result<void> CopyStage::begin(Batch& batch) {
  if (auto there = copies_.check(); !there) return there;
  if (auto mapped = batch.tensors().map_for_copy(); !mapped) return mapped;
  const std::vector<at::Tensor> sources = batch.tensors().copy_sources();
  auto rooms = allocate(batch, sources);
  if (!rooms) return rooms.error();
  // A single-use arena is not registered: that takes longer than its copy.
  if (batch.tensors().lease() && !batch.record().facts().is_transient)
    registrations_.add(batch.tensors().lease(), batch.record().facts().slab_bytes);
  CopySources read{.lease = batch.tensors().lease(), .tensors = sources};
  if (auto started = start(batch, sources, rooms.value()); !started)
    return copies_.give_up(std::move(read), started.error());
  auto event = copies_.add(std::move(read));
  if (!event) return event.error();
  batch.set_ready_event(std::move(event).value());
  std::vector<at::Tensor> tensors;
  tensors.reserve(rooms.value().size());
  for (Room& room : rooms.value()) tensors.push_back(std::move(room.tensor));
  batch.tensors().replace(std::move(tensors));
  return {};
}

Result<std::vector<CopyStage::Room>> CopyStage::allocate(const Batch& batch, const std::vector<at::Tensor>& sources) {
  std::vector<Room> rooms;
  rooms.reserve(sources.size());
  for (size_t index = 0; index < sources.size(); ++index) {
    auto made = allocate_one(batch, index, sources[index]);
    if (!made) {
      return Fault{made.error().code, "allocating memory on " + device_->name() + " for a batch of " +
                                          std::to_string(batch.record().bytes() + batch.record().wide_bytes()) +
                                          " bytes failed: " + made.error().message};
    }
    rooms.push_back(std::move(made).value());
  }
  return rooms;
}

Result<CopyStage::Room> CopyStage::allocate_one(const Batch& batch, size_t index, const at::Tensor& source) {
  if (batch.record().is_withheld(index)) return Room{.tensor = source, .narrow = {}, .scratch = {}};
  Room room;
  const wire::Widening* const widening = batch.tensors().widening(index);
  auto tensor = device_->allocate(widening != nullptr ? batch.tensors().meta(index) : source);
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
    if (batch.record().is_withheld(index)) continue;
    const Room& room = rooms[index];
    const at::Tensor& target = room.narrow.defined() ? room.narrow : room.tensor;
    PENSTOCK_ASSERT(sources[index].storage().nbytes() == target.storage().nbytes(),
                    "a tensor on the device has another size than its source");
    if (sources[index].storage().nbytes() == 0) continue;
    if (auto started = device_->copy(sources[index], target); !started) return started.error();
    if (!room.narrow.defined()) continue;
    const wire::Widening& widening = *batch.tensors().widening(index);
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
  for (const at::Tensor& tensor : batch.tensors().all())
    if (!tensor.is_meta()) copied.push_back(tensor);
  auto handed_over = device_->hand_over(*event, copied);
  if (handed_over) return {};
  return Fault{Errc::kFailed, "waiting for the copy of a batch to " + device_->name() +
                                  " failed: " + handed_over.error().message +
                                  "; if the device is no longer usable in this process, restart the program"};
}

bool AheadRequest::has(const wire::Frame& frame, size_t index) const {
  const size_t leaf_count = frame.leaf_count();
  if (index < leaf_count) return std::ranges::find(leaves, static_cast<uint32_t>(index)) != leaves.end();
  return std::ranges::find(keys, frame.boundary_keys[index - leaf_count]) != keys.end();
}

void AheadWishes::set(std::shared_ptr<const AheadRequest> request) {
  const MutexLock lock(mutex_);
  request_ = std::move(request);
}

std::shared_ptr<const AheadRequest> AheadWishes::get() const {
  const MutexLock lock(mutex_);
  return request_;
}

std::optional<at::Tensor> AheadCopies::take(size_t index) {
  if (index >= tensors_.size() || !tensors_[index].defined()) return std::nullopt;
  at::Tensor tensor = std::exchange(tensors_[index], {});
  if (!device_->wait_for(*event_) || !device_->hand_over(*event_, std::span(&tensor, 1))) return std::nullopt;
  return tensor;
}

Result<void> AheadStage::begin(Batch& batch) {
  const auto request = requests_->get();
  if (request && is_at(request->device) && batch.tensors().shared_files().empty()) copy(batch, *request);
  return {};
}

bool AheadStage::is_at(c10::Device place) {
  if (site_ && site_->place == place) return static_cast<bool>(site_->copies.check());
  if (unusable_ == place) return false;
  auto opened = open_device_(place);
  if (!opened) {
    unusable_ = place;
    return false;
  }
  site_ = std::make_unique<Site>(place, std::shared_ptr<device::Device>(std::move(opened).value()));
  return true;
}

void AheadStage::copy(Batch& batch, const AheadRequest& request) {
  std::vector<at::Tensor> rooms(batch.record().frame().tensors.size());
  CopySources sources{.lease = batch.tensors().lease(), .tensors = {}};
  std::vector<size_t> places;
  for (size_t index = 0; index < rooms.size(); ++index) {
    if (!request.has(batch.record().frame(), index) || batch.record().is_withheld(index)) continue;
    at::Tensor source = batch.tensors().copy_source(index);
    if (source.storage().nbytes() == 0) continue;
    auto room = site_->device->allocate(source);
    if (!room) return;
    rooms[index] = std::move(room).value();
    sources.tensors.push_back(std::move(source));
    places.push_back(index);
  }
  if (places.empty()) return;
  if (batch.tensors().lease() && !batch.record().facts().is_transient)
    site_->registrations.add(batch.tensors().lease(), batch.record().facts().slab_bytes);
  for (size_t i = 0; i < places.size(); ++i) {
    if (site_->device->copy(sources.tensors[i], rooms[places[i]])) continue;
    site_->copies.give_up(std::move(sources), {Errc::kFailed, "a copy could not be started"});
    return;
  }
  auto event = site_->copies.add(std::move(sources));
  if (!event) return;
  batch.set_ahead(
      std::make_shared<AheadCopies>(site_->device, site_->place, std::move(event).value(), std::move(rooms)));
}

}  // namespace penstock::loader
