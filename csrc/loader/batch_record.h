// SPDX-License-Identifier: Apache-2.0
#pragma once
// The record of a batch: the request that it answers, the layout and encoding of its tensors, its values that are no
// tensors, its dataset's state, or the error in its place. Its tensors' bytes are elsewhere (batch_tensors.h).

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "loader/counters.h"
#include "session/request_order.h"
#include "wire/frame.h"
#include "wire/message.h"

namespace penstock::loader {

class BatchRecord {
 public:
  // The error that is raised in the place of a batch of a pool, or of a thread of this process.
  struct RemoteError {
    std::string type_name;
    std::string text;
    std::string worker;             // that raised it; empty if it was the trainer
    std::exception_ptr cause = {};  // the exception itself, if it was thrown in this process
  };

  // Where to fetch the batch's withheld leaves: the request that the batch answers, and the worker that made it.
  struct Origin {
    session::SharedContent request;
    uint64_t worker_id = 0;
  };

  explicit BatchRecord(const wire::BatchFacts& facts) : facts_(facts) {}
  // The frame's views would point into the other record.
  BatchRecord(const BatchRecord&) = delete;
  BatchRecord& operator=(const BatchRecord&) = delete;

  // Takes and checks the bytes of a record that was received, of a batch with `payload_bytes_max` bytes beside it.
  // kMalformed.
  Result<void> read(std::vector<std::byte> record, uint64_t payload_bytes_max, bool allow_pickle);
  // Takes the layout of tensors that were made in this process, boundary tensors last, and the values around them.
  void describe(std::vector<wire::TensorEntry> tensors, std::vector<std::string> boundary_keys,
                std::vector<std::byte> nest);
  void set_remote_error(RemoteError error) { remote_error_ = std::move(error); }

  const wire::BatchFacts& facts() const { return facts_; }
  const wire::Frame& frame() const { return frame_; }
  const wire::TensorEntry& entry(size_t index) const { return frame_.tensors[index]; }
  size_t tensor_count() const { return frame_.tensors.size(); }
  bool raises() const { return (facts_.flags & wire::kBatchRaises) != 0; }
  bool has_state() const { return (facts_.flags & wire::kBatchHasState) != 0; }
  const std::optional<RemoteError>& remote_error() const { return remote_error_; }

  // The name of the pool's worker that sent the batch, for messages; empty for a local worker's batch.
  const std::string& sender() const { return sender_; }
  void set_sender(const std::string& worker) { sender_ = worker; }

  // The batch's worker, and the times of the stages that it has passed so far.
  BatchTimes& times() { return times_; }

  // The state of a pool's dataset after this batch, as encoded by the worker; empty if the dataset has none.
  std::span<const std::byte> state() const { return state_; }
  void set_state(std::span<const std::byte> state) { state_.assign(state.begin(), state.end()); }

  const std::optional<Origin>& origin() const { return origin_; }
  void set_origin(Origin origin) { origin_ = std::move(origin); }

  // Makes a leaf a withheld one that this rank does not read (replica/relay.h). Its bytes count as received.
  void leave_out(size_t index);
  bool is_withheld(size_t index) const { return entry(index).encoding == wire::Encoding::kWithheld; }
  // Whether some tensors are narrow, with fewer bytes than their values need.
  bool is_narrow() const;

  // Bytes that the batch arrived with, including its shared-memory files.
  uint64_t bytes() const;
  // Total bytes of the withheld leaves.
  uint64_t withheld_bytes() const;
  // Bytes of the narrow tensors once they are widened.
  uint64_t wide_bytes() const;
  // Upper bound on the bytes of its tensors and values, as counted by wire::whole_bytes() and check_nest().
  uint64_t whole_bytes() const { return wire::whole_bytes(frame_) + nest_bytes_; }

 private:
  Result<void> check_withheld() const;

  wire::BatchFacts facts_;
  BatchTimes times_;
  std::vector<std::byte> record_;  // the frame's views point here
  std::vector<std::string> keys_;  // of a batch made in this process; the frame's views point here, too
  wire::Frame frame_;
  uint64_t nest_bytes_ = 0;  // size of the record's values, as counted by check_nest()
  std::string sender_;
  std::vector<std::byte> state_;
  std::optional<Origin> origin_;
  std::optional<RemoteError> remote_error_;
};

}  // namespace penstock::loader
