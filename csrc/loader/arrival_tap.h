// SPDX-License-Identifier: Apache-2.0
#pragma once
// An observer of a source: it sees what is requested and what arrives, before the trainer does. The relay that forwards
// batches to other ranks is one (replica/relay.h).

#include <optional>

#include "base/result.h"
#include "loader/inbox.h"
#include "session/request_content.h"

namespace penstock::loader {

class ArrivalTap {
 public:
  ArrivalTap() = default;
  ArrivalTap(const ArrivalTap&) = delete;
  ArrivalTap& operator=(const ArrivalTap&) = delete;
  virtual ~ArrivalTap() = default;

  // A batch is requested. Called on the trainer's thread.
  virtual void asked(const session::RequestContent& content) = 0;
  // A batch has arrived, or the end of a shard in its place. Called on the stage thread, which waits until this
  // returns.
  virtual void arrived(Arrival& arrival) = 0;
  // No more arrivals follow: a blocked arrived() must return. Called on the owner's thread.
  virtual void source_stopped() = 0;
  // The reason of its failure, if it has failed: the trainer's next call reports it. Called on any thread.
  virtual std::optional<Fault> failure() const = 0;
};

}  // namespace penstock::loader
