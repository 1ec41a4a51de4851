// SPDX-License-Identifier: Apache-2.0
#pragma once
// The stages that copy batches to a device. CopyStage, the stage for device=, copies whole batches; AheadStage copies
// only the tensors that the program would copy itself. Both copy from slabs that the device reads directly
// (SlabRegistrations) and that are leased until the copies from them are finished (CopiesInFlight).

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "device/device.h"
#include "loader/batch_memory.h"
#include "loader/batch_stage.h"

namespace penstock::loader {

// Keeps memory until the process ends, and from being destroyed: it is unknown what still reads it, and for how long.
// Thread-safe.
void keep_until_exit(std::shared_ptr<void> memory);

// Slabs that a device reads directly. Registration is slow, so a slab is registered once, and again only when it has
// grown; a slab that cannot be registered is copied from unregistered. A view is shared so that its memory stays mapped
// as long as it is registered with the device, and dropped once there are no other references. Confined to the thread
// that uses the device.
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

// The sources of copies that are started together: the host tensors share the slab's lease.
struct CopySources {
  c10::intrusive_ptr<SlabLease> lease;
  std::vector<at::Tensor> tensors;
};

// The running copies to a device and their sources. A slab that a copy reads is leased until the copy is known to be
// finished, from its event or from a wait for all copies. If neither succeeds, the device is lost to this process and
// may keep reading indefinitely: such slabs stay mapped and are retired, so that no worker ever writes to them again.
//
// Confined to the thread that starts the copies. `device` outlives it. The destructor waits for the copies.
class CopiesInFlight {
 public:
  explicit CopiesInFlight(device::Device& device) : device_(device) {}
  CopiesInFlight(const CopiesInFlight&) = delete;
  CopiesInFlight& operator=(const CopiesInFlight&) = delete;
  ~CopiesInFlight();

  // Fails with kFailed once the device was lost.
  Result<void> check() const;
  // Call when all copies from `sources` were started: the event completes with them.
  Result<std::shared_ptr<device::DeviceEvent>> add(CopySources sources);
  // Call when some of the copies may have been started, without an event that shows their end. Returns the error for
  // the user.
  Fault give_up(CopySources sources, const Fault& cause);
  // Releases the sources of finished copies. Returns the number of running copies.
  size_t reclaim();

  // Slabs that are never released, because the device was lost while it might have been reading them.
  size_t retired_count() const { return retired_count_; }

 private:
  struct Copy {
    std::shared_ptr<device::DeviceEvent> event;  // none for copies passed to give_up()
    CopySources sources;
  };

  void settle();
  void lose(const std::string& cause);
  Fault loss() const;

  device::Device& device_;
  std::deque<Copy> copies_;
  std::string loss_;  // the cause of the loss; empty while the device works
  size_t retired_count_ = 0;
};

// The stage for device=: it starts the copy of a batch to a device, from slabs that the device reads directly, and
// after the copy the widening of narrow tensors. All memory is allocated first, so a batch never holds some memory on
// the device while it waits for the rest. A withheld leaf needs no memory: its meta tensor stays in its place. Tensors
// on the device belong to torch's allocator, and are kept for the stream on which the trainer reads them.
//
// Same threads as BatchStage. The destructor waits for the running copies.
class CopyStage final : public BatchStage {
 public:
  explicit CopyStage(std::unique_ptr<device::Device> device);

  Result<void> begin(Batch& batch) override;
  Result<void> finish(Batch& batch) override;
  bool takes_narrow() const override { return takes_narrow_; }
  size_t reclaim() override { return copies_.reclaim(); }

  // See CopiesInFlight.
  size_t retired_count() const { return copies_.retired_count(); }

 private:
  // Device memory for one tensor. `narrow` and `scratch` are freed once the work on them was started.
  struct Room {
    at::Tensor tensor;
    at::Tensor narrow;   // undefined unless the device widens it
    at::Tensor scratch;  // undefined if none is needed
  };

  Result<std::vector<Room>> allocate(const Batch& batch, const std::vector<at::Tensor>& sources);
  Result<Room> allocate_one(const Batch& batch, size_t index, const at::Tensor& source);
  Result<void> start(const Batch& batch, const std::vector<at::Tensor>& sources, const std::vector<Room>& rooms);

  std::unique_ptr<device::Device> device_;
  const bool takes_narrow_;
  SlabRegistrations registrations_;
  CopiesInFlight copies_;
};

// The tensors that are copied ahead: leaves by number, boundary tensors by key.
struct AheadRequest {
  c10::Device device;
  std::vector<uint32_t> leaves{};
  std::vector<std::string> keys{};

  bool has(const wire::Frame& frame, size_t index) const;
};

// The trainer's current wish. Thread-safe.
class AheadWishes {
 public:
  void set(std::shared_ptr<const AheadRequest> request);
  std::shared_ptr<const AheadRequest> get() const;

 private:
  mutable Mutex mutex_;
  std::shared_ptr<const AheadRequest> request_ PENSTOCK_GUARDED_BY(mutex_);
};

// The copies of one batch. Confined to the trainer's thread.
class AheadCopies {
 public:
  // `tensors` are in the batch's order, undefined where no copy was made.
  AheadCopies(std::shared_ptr<device::Device> device, c10::Device place, std::shared_ptr<device::DeviceEvent> event,
              std::vector<at::Tensor> tensors)
      : device_(std::move(device)), place_(place), event_(std::move(event)), tensors_(std::move(tensors)) {}

  c10::Device device() const { return place_; }
  // Returns the copy of a tensor, once its source is no longer read: the program may then write to the source, as after
  // a copy that it made itself. Each copy is returned once, since the caller may write to the copy, too. Returns
  // nullopt if there is no copy, or if it failed. Blocks.
  std::optional<at::Tensor> take(size_t index);

 private:
  std::shared_ptr<device::Device> device_;
  c10::Device place_;
  std::shared_ptr<device::DeviceEvent> event_;
  std::vector<at::Tensor> tensors_;
};

// The stage that copies tensors of a batch to a device before the program does. The batch keeps its tensors on the
// host; the copies are kept in addition, for the next caller that would copy the same bytes. The program itself
// determines by its copies which tensors are copied (AheadWishes). A copy that cannot be made, for lack of memory for
// example, is skipped: the program makes it, and receives the error that it would have received anyway.
//
// Same threads as BatchStage.
class AheadStage final : public BatchStage {
 public:
  using OpenDevice = std::function<Result<std::unique_ptr<device::Device>>(c10::Device)>;

  AheadStage(std::shared_ptr<AheadWishes> requests, OpenDevice open_device)
      : requests_(std::move(requests)), open_device_(std::move(open_device)) {}

  Result<void> begin(Batch& batch) override;
  Result<void> finish(Batch&) override { return {}; }
  bool takes_narrow() const override { return false; }
  size_t reclaim() override { return site_ ? site_->copies.reclaim() : 0; }

 private:
  // The device in use; the members are declared so that they are destroyed in a safe order.
  struct Site {
    Site(c10::Device at, std::shared_ptr<device::Device> opened)
        : place(at), device(std::move(opened)), registrations(*device), copies(*device) {}

    c10::Device place;
    std::shared_ptr<device::Device> device;
    SlabRegistrations registrations;
    CopiesInFlight copies;
  };

  bool is_at(c10::Device place);
  void copy(Batch& batch, const AheadRequest& request);

  const std::shared_ptr<AheadWishes> requests_;
  const OpenDevice open_device_;
  std::optional<c10::Device> unusable_{};
  std::unique_ptr<Site> site_;
};

}  // namespace penstock::loader
