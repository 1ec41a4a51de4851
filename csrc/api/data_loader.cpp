// SPDX-License-Identifier: Apache-2.0
#include "penstock/data_loader.h"

#include <utility>

#include "api/data_loader_impl.h"
#include "api/exceptions.h"
#include "api/state_access.h"
#include "api/torch_check.h"

namespace penstock {

DataLoader::DataLoader(AnyDataset dataset, Options options, TorchVersion torch) {
  api::check_torch(torch, "this program");
  impl_ = std::make_unique<Impl>(std::move(dataset), std::move(options));
}
DataLoader::~DataLoader() = default;
DataLoader::DataLoader(DataLoader&&) noexcept = default;
DataLoader& DataLoader::operator=(DataLoader&&) noexcept = default;

DataLoader::Iterator DataLoader::begin() {
  impl_->begin_epoch();
  Iterator iterator(*this, impl_->begun_count());
  ++iterator;
  return iterator;
}

DataLoader::Iterator& DataLoader::Iterator::operator++() {
  if (is_at_end_) return *this;
  if (loader_->impl_->begun_count() != epoch_) {
    api::refuse("an iterator of an earlier epoch was advanced; the loader returns the batches of one epoch at a time");
  }
  batch_ = Batch();  // frees its memory for the next batch
  auto batch = loader_->impl_->next();
  is_at_end_ = !batch;
  if (batch) batch_ = *std::move(batch);
  return *this;
}

void DataLoader::begin_epoch() { impl_->begin_epoch(); }
std::optional<Batch> DataLoader::next() { return impl_->next(); }
std::optional<int64_t> DataLoader::size() const { return impl_->size(); }
State DataLoader::state() const { return StateAccess::make(impl_->state()); }
void DataLoader::load_state(const State& state) { impl_->load_state(StateAccess::value_of(state)); }
Stats DataLoader::stats() const { return impl_->stats(); }

}  // namespace penstock
