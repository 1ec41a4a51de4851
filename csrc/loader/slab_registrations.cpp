// SPDX-License-Identifier: Apache-2.0
#include "loader/slab_registrations.h"

#include <utility>
#include <vector>

#include "base/mutex.h"

namespace penstock::loader {

// The memory has no owner that lives as long, so this is global.
void keep_for_good(std::shared_ptr<void> memory) {
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

}  // namespace penstock::loader
