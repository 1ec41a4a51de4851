// SPDX-License-Identifier: Apache-2.0
#include "loader/batch_record.h"

#include <algorithm>
#include <string>

#include "wire/nest.h"

namespace penstock::loader {
namespace {

using wire::Encoding;
using wire::TensorEntry;

// The sum of `bytes_of` over the tensors that `is_counted` selects.
uint64_t total(const wire::Frame& frame, auto is_counted, auto bytes_of) {
  uint64_t bytes = 0;
  for (const TensorEntry& entry : frame.tensors) {
    if (is_counted(entry.encoding)) bytes += bytes_of(entry);
  }
  return bytes;
}

}  // namespace

Result<void> BatchRecord::read(std::vector<std::byte> record, uint64_t payload_bytes_max, bool allow_pickle) {
  record_ = std::move(record);
  auto frame = wire::parse_frame(record_);
  if (!frame) return frame.error();
  frame_ = std::move(frame).value();
  if (frame_.payload_bytes > payload_bytes_max) {
    return Fault{Errc::kMalformed, "a batch record claims " + std::to_string(frame_.payload_bytes) +
                                       " payload bytes but " + std::to_string(payload_bytes_max) +
                                       " were received; trainer and workers must run the same version of penstock"};
  }
  if (!allow_pickle && frame_.shared_file_count() > 0) {
    return Fault{Errc::kMalformed,
                 "a batch record refers to shared memory, which only a local worker of this process can pass"};
  }
  const auto nest = wire::check_nest(frame_.nest, static_cast<uint32_t>(frame_.leaf_count()), allow_pickle);
  if (!nest) return nest.error();
  nest_bytes_ = nest.value();
  return check_withheld();
}

void BatchRecord::describe(std::vector<TensorEntry> tensors, std::vector<std::string> boundary_keys,
                           std::vector<std::byte> nest) {
  record_ = std::move(nest);
  keys_ = std::move(boundary_keys);
  frame_.nest = record_;
  frame_.boundary_keys.assign(keys_.begin(), keys_.end());
  frame_.tensors = std::move(tensors);
  for (TensorEntry& entry : frame_.tensors) {
    entry.offset = frame_.payload_bytes;
    frame_.payload_bytes += entry.bytes;
  }
}

Result<void> BatchRecord::check_withheld() const {
  if (withheld_bytes() == 0) return {};
  const auto fixed = wire::fixed_leaves(frame_.nest);
  for (size_t index = 0; index < frame_.leaf_count(); ++index) {
    if (!is_withheld(index) || (fixed && !fixed->contains(static_cast<uint32_t>(index)))) continue;
    return Fault{
        Errc::kMalformed,
        "a batch was received without a value that no tensor can stand in for; trainer and workers must run the same "
        "version of penstock"};
  }
  return {};
}

void BatchRecord::leave_out(size_t index) {
  TensorEntry& entry = frame_.tensors[index];
  entry.encoding = Encoding::kWithheld;
  entry.offset = entry.bytes = 0;
}

bool BatchRecord::is_narrow() const {
  return std::ranges::any_of(frame_.tensors, [](const TensorEntry& entry) { return wire::is_narrow(entry.encoding); });
}

uint64_t BatchRecord::bytes() const {
  const auto is_shared = [](Encoding encoding) { return encoding == Encoding::kShared; };
  return frame_.payload_bytes + total(frame_, is_shared, [](const TensorEntry& entry) { return entry.bytes; });
}

uint64_t BatchRecord::withheld_bytes() const {
  const auto is_withheld = [](Encoding encoding) { return encoding == Encoding::kWithheld; };
  return total(frame_, is_withheld, wire::plain_bytes);
}

uint64_t BatchRecord::wide_bytes() const { return total(frame_, wire::is_narrow, wire::plain_bytes); }

}  // namespace penstock::loader
