// SPDX-License-Identifier: Apache-2.0
#include "loader/copies_under_way.h"

#include <utility>

#include "loader/slab_registrations.h"

namespace penstock::loader {

CopiesUnderWay::~CopiesUnderWay() {
  if (!copies_.empty()) settle();
}

Result<void> CopiesUnderWay::check() const {
  if (!loss_.empty()) return loss();
  return {};
}

Result<std::shared_ptr<device::DeviceEvent>> CopiesUnderWay::add(CopySources sources) {
  auto event = device_.record();
  if (!event) return give_up(std::move(sources), event.error());
  copies_.push_back({.event = event.value(), .sources = std::move(sources)});
  return event;
}

Fault CopiesUnderWay::give_up(CopySources sources, const Fault& cause) {
  copies_.push_back({.event = nullptr, .sources = std::move(sources)});
  settle();
  if (!loss_.empty()) return loss();
  return {Errc::kFailed, "copying a batch to " + device_.name() + " failed: " + cause.message};
}

size_t CopiesUnderWay::reclaim() {
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
void CopiesUnderWay::settle() {
  if (const auto waited = device_.wait_for_all(); !waited) return lose(waited.error().message);
  copies_.clear();
}

void CopiesUnderWay::lose(const std::string& cause) {
  loss_ = cause;
  for (Copy& copy : copies_) {
    if (copy.sources.lease) {
      copy.sources.lease->retire();
      ++retired_count_;
    }
    keep_for_good(std::make_shared<std::vector<at::Tensor>>(std::move(copy.sources.tensors)));
  }
  copies_.clear();
}

Fault CopiesUnderWay::loss() const {
  return {Errc::kFailed, device_.name() + " is no longer usable in this process (" + loss_ +
                             "), so no batch can be copied to it; find the cause in the first error of a device call, "
                             "and restart the program"};
}

}  // namespace penstock::loader
