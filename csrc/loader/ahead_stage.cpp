// SPDX-License-Identifier: Apache-2.0
#include "loader/ahead_stage.h"

#include <algorithm>
#include <utility>

#include "loader/batch.h"

namespace penstock::loader {

bool AheadWish::has(const wire::Frame& frame, size_t index) const {
  const size_t leaf_count = frame.leaf_count();
  if (index < leaf_count) return std::ranges::find(leaves, static_cast<uint32_t>(index)) != leaves.end();
  return std::ranges::find(keys, frame.boundary_keys[index - leaf_count]) != keys.end();
}

void AheadWishes::set(std::shared_ptr<const AheadWish> wish) {
  const MutexLock lock(mutex_);
  wish_ = std::move(wish);
}

std::shared_ptr<const AheadWish> AheadWishes::get() const {
  const MutexLock lock(mutex_);
  return wish_;
}

std::optional<at::Tensor> AheadCopies::take(size_t index) {
  if (index >= tensors_.size() || !tensors_[index].defined()) return std::nullopt;
  at::Tensor tensor = std::exchange(tensors_[index], {});
  if (!device_->wait_for(*event_) || !device_->hand_over(*event_, std::span(&tensor, 1))) return std::nullopt;
  return tensor;
}

Result<void> AheadStage::begin(Batch& batch) {
  const auto wish = wishes_->get();
  if (wish && is_at(wish->device) && batch.shared_files().empty()) copy(batch, *wish);
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

void AheadStage::copy(Batch& batch, const AheadWish& wish) {
  std::vector<at::Tensor> rooms(batch.frame().tensors.size());
  CopySources sources{.lease = batch.lease(), .tensors = {}};
  std::vector<size_t> places;
  for (size_t index = 0; index < rooms.size(); ++index) {
    if (!wish.has(batch.frame(), index) || batch.is_withheld(index)) continue;
    at::Tensor source = batch.copy_source(index);
    if (source.storage().nbytes() == 0) continue;
    auto room = site_->device->allocate(source);
    if (!room) return;
    rooms[index] = std::move(room).value();
    sources.tensors.push_back(std::move(source));
    places.push_back(index);
  }
  if (places.empty()) return;
  if (batch.lease() && !batch.facts().is_transient) site_->registrations.add(batch.lease(), batch.facts().slab_bytes);
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
