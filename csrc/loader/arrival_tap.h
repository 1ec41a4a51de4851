// SPDX-License-Identifier: Apache-2.0
#pragma once
// Somebody who is shown what a source is asked for and what arrives, before the trainer has it: the relay that hands
// batches on to other ranks (replica/relay.h).

#include <optional>

#include "base/result.h"
#include "cluster/request_content.h"
#include "loader/inbox.h"

namespace penstock::loader {

class ArrivalTap {
 public:
  ArrivalTap() = default;
  ArrivalTap(const ArrivalTap&) = delete;
  ArrivalTap& operator=(const ArrivalTap&) = delete;
  virtual ~ArrivalTap() = default;

  // A batch is asked for. On the trainer's thread.
  virtual void asked(const cluster::RequestContent& content) = 0;
  // A batch is here, or the end of a shard in its place. On the thread of the stages, which waits for it.
  virtual void arrived(Arrival& arrival) = 0;
  // Nothing arrives any more: nobody who waits in arrived() does so on. On the owner's thread.
  virtual void source_stopped() = 0;
  // Why it has failed, if it has: the trainer is to know by its next call. For any thread.
  virtual std::optional<Fault> failure() const = 0;
};

}  // namespace penstock::loader
