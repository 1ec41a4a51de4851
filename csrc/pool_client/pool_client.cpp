// SPDX-License-Identifier: Apache-2.0
#include "pool_client/pool_client.h"

#include <utility>

#include "base/result.h"

namespace penstock::pool_client {

namespace {

constexpr size_t kArrivalCountMax = 1 << 20;

}  // namespace

PoolSource::PoolSource(PoolIoOptions options, const net::RunId& run, std::optional<net::KeyRing> own_keys,
                       std::vector<OwnWorker> own_workers)
    : loader::BatchSource(kArrivalCountMax),
      options_(std::move(options)),
      io_(options_, run, PoolDirectory(options_.keys, std::move(own_keys), std::move(own_workers)), stages_, inbox_),
      loop_("pk_pool_io", "which receives batches from the pool", io_) {}

PoolSource::~PoolSource() { stop(); }

Result<void> PoolSource::start(loader::Stages stages) {
  stages.wide_bytes = options_.arena_bytes;
  if (auto started = stages_.start(std::move(stages)); !started) return started;
  return loop_.start();
}

void PoolSource::stop() {
  inbox_.close();
  stages_.close();
  loop_.stop();
  stages_.stop();
}

void PoolSource::lose_own_worker(uint64_t worker_id) {
  loop_.post([this, worker_id] { io_.lose_own_worker(worker_id); });
}

void PoolSource::fetch(const std::shared_ptr<session::RequestContent>& content) {
  PENSTOCK_ASSERT(named_ != nullptr, "a batch was requested before its job was set");
  content->blobs = named_;
  content->seeds = seeds_;
  stages_.asked(*content);
  loop_.post([this, content] { io_.ask(content); });
}

void PoolSource::recall(const loader::BatchRecord::Origin& origin) {
  loop_.post([this, origin] { io_.recall(origin); });
}

void PoolSource::forget_recall(const loader::BatchRecord::Origin& origin) {
  loop_.post([this, origin] { io_.forget_recall(origin); });
}

void PoolSource::announce(const wire::ToJob& message) {
  PENSTOCK_ASSERT(message.kind == wire::ToJob::Kind::kEpoch, "a pool receives only the start of an epoch");
  seeds_ = std::make_shared<std::vector<std::byte>>(message.seeds.begin(), message.seeds.end());
  loop_.post([this, epoch = message.key.epoch, lanes = std::exchange(next_lanes_, {})]() mutable {
    io_.begin_epoch(epoch, std::move(lanes));
  });
}

std::string PoolSource::describe() const {
  return io_.standing().describe(options_.controller ? options_.controller->text() : "");
}

}  // namespace penstock::pool_client
