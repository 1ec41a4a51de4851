// SPDX-License-Identifier: Apache-2.0
#pragma once
// Slabs that a device reads directly. Registration is slow, so a slab is registered once, and again only when it has
// grown; a slab that cannot be registered is copied from unregistered. A view is shared so that its memory stays mapped
// as long as it is registered with the device, and dropped once there are no other references.

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "device/device.h"
#include "loader/slab_lease.h"

namespace penstock::loader {

// Keeps memory until the process ends, and from being destroyed: it is unknown what still reads it, and for how long.
// Thread-safe.
void keep_for_good(std::shared_ptr<void> memory);

// Confined to the thread that uses the device.
class SlabRegistrations {
 public:
  explicit SlabRegistrations(device::MemoryRegistrar& registrar) : registrar_(registrar) {}
  SlabRegistrations(const SlabRegistrations&) = delete;
  SlabRegistrations& operator=(const SlabRegistrations&) = delete;
  ~SlabRegistrations();

  // Registers the first `bytes` of a leased slab, and forgets arenas without leases. Returns whether the slab is
  // registered.
  bool add(const c10::intrusive_ptr<SlabLease>& lease, uint64_t bytes);

 private:
  struct Slab {
    uint64_t bytes = 0;
    bool has_failed = false;
  };
  using Slabs = std::map<std::byte*, Slab>;

  void unregister(const Slabs& slabs);

  device::MemoryRegistrar& registrar_;
  std::map<std::shared_ptr<shm::ArenaView>, Slabs> arenas_;
};

}  // namespace penstock::loader
