// SPDX-License-Identifier: Apache-2.0
#pragma once
// The stage that copies tensors of a batch to a device before the program does. The batch keeps its tensors on the
// host; the copies are kept in addition, for the next caller that would copy the same bytes. The program itself
// determines by its copies which tensors are copied (AheadWishes). A copy that cannot be made, for lack of memory for
// example, is skipped: the program makes it, and receives the error that it would have received anyway.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "device/device.h"
#include "loader/batch_stage.h"
#include "loader/copies_under_way.h"
#include "loader/slab_registrations.h"

namespace penstock::loader {

// The tensors that are copied ahead: leaves by number, boundary tensors by key.
struct AheadWish {
  c10::Device device;
  std::vector<uint32_t> leaves{};
  std::vector<std::string> keys{};

  bool has(const wire::Frame& frame, size_t index) const;
};

// The trainer's current wish. Thread-safe.
class AheadWishes {
 public:
  void set(std::shared_ptr<const AheadWish> wish);
  std::shared_ptr<const AheadWish> get() const;

 private:
  mutable Mutex mutex_;
  std::shared_ptr<const AheadWish> wish_ PENSTOCK_GUARDED_BY(mutex_);
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

// Same threads as BatchStage.
class AheadStage final : public BatchStage {
 public:
  using OpenDevice = std::function<Result<std::unique_ptr<device::Device>>(c10::Device)>;

  AheadStage(std::shared_ptr<AheadWishes> wishes, OpenDevice open_device)
      : wishes_(std::move(wishes)), open_device_(std::move(open_device)) {}

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
    CopiesUnderWay copies;
  };

  bool is_at(c10::Device place);
  void copy(Batch& batch, const AheadWish& wish);

  const std::shared_ptr<AheadWishes> wishes_;
  const OpenDevice open_device_;
  std::optional<c10::Device> unusable_{};
  std::unique_ptr<Site> site_;
};

}  // namespace penstock::loader
