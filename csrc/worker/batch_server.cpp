// SPDX-License-Identifier: Apache-2.0
#include "worker/batch_server.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "base/clock.h"
#include "runtime/numeric_fingerprint.h"
#include "server/maker.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

using server::PoolResult;
using server::PoolWork;
using wire::AnswerKind;

namespace {

Result<void> check_state(std::span<const std::byte> state) {
  if (state.size() <= wire::kPoolBodyBytesMax / 2) return {};
  return Fault{Errc::kTooLarge, "the dataset's state after a batch has " + std::to_string(state.size()) +
                                    " bytes, but a pool worker can send at most " +
                                    std::to_string(wire::kPoolBodyBytesMax / 2) +
                                    "; keep large objects out of state_dict()"};
}

// A trainer rejects batches with more elements; each worker in turn would appear to answer incorrectly.
Result<void> check_elements(const BatchContent& content) {
  uint64_t bytes = 0;
  for (size_t index = 0; index < content.tensors.size(); ++index) {
    if (std::binary_search(content.withheld.begin(), content.withheld.end(), index)) continue;
    const at::Tensor& tensor = content.tensors[index];
    uint64_t its_bytes = 0;
    const bool overflows = __builtin_mul_overflow(static_cast<uint64_t>(tensor.numel()), tensor.itemsize(), &its_bytes);
    if (!overflows && its_bytes <= wire::kElementBytesMax - bytes) {
      bytes += its_bytes;
      continue;
    }
    return Fault{Errc::kTooLarge, "the tensors of a batch have elements of more than " +
                                      std::to_string(wire::kElementBytesMax) +
                                      " bytes, counting each repetition by expand(); expand them in the program"};
  }
  return {};
}

}  // namespace

BatchServer::BatchServer(server::WorkSource& source, const shm::SlabPoolOptions& slabs,
                         const std::atomic<bool>& is_closing)
    : source_(source), kept_bytes_max_(slabs.arena_bytes / (2 * kKeptBatchesMax)), maker_(slabs, is_closing) {
  maker_.bound_sharing();
}

void BatchServer::note_cost(const PoolWork& work, PoolResult& result) {
  const auto time = std::chrono::steady_clock::now() - work.begun_at;
  const auto cpu_time = server::process_cpu_time() - work.cpu_begun_at;
  const double share = static_cast<double>(cpu_time.count()) / std::max<double>(1.0, static_cast<double>(time.count()));
  result.fetch_time = wire::time_units(time);
  result.cpu_share = static_cast<uint8_t>(std::clamp(std::round(share * wire::kCpuShareUnit), 0.0, 255.0));
}

Result<void> BatchServer::answer(const PoolWork& work, BatchContent content, PoolMarks marks) {
  if (auto checked = check_state(marks.state); !checked) return checked;
  const auto times = writer().clock().times(work.begun_at, clock_now());
  prefix_cache_.select(work.prefixes(), maker_.prefixes());
  const bool may_be_recalled = content.withheld.empty();  // otherwise the caller has left leaves out for good
  const bool is_whole =
      work.is_recall() || work.is_handed_over;  // leaving some tensors out would cost a copy of the others
  auto made = maker_.make(content, {.epoch_seed = work.epoch_seed,
                                    .sequence = work.number(),
                                    .shipment = is_whole ? nullptr : prefix_cache_.shipment(),
                                    .link_bytes_per_s = work.is_handed_over ? 0 : work.link_bytes_per_s});
  if (!made) return made.error();
  if (auto checked = check_elements(content); !checked) {
    const SlabBatch unsent(std::move(made.value().sealed));  // gives its slab back
    return checked;
  }
  if (made.value().is_compiled) marks.flags |= wire::kBatchCompiled;
  if (may_be_recalled && !content.withheld.empty())
    kept_.keep(work.trainer_id, work.key, content, marks.flags, kept_bytes_max_);
  return send(work, std::move(made).value(), std::move(marks), times);
}

Result<bool> BatchServer::answer_kept(const PoolWork& work) {
  const auto* kept = kept_.find(work.trainer_id, {work.key.epoch, work.number()});
  if (kept == nullptr) return false;
  writer().begin();
  auto made = maker_.make_plain(kept->content());
  if (!made) return made.error();
  if (auto sent = send(work, std::move(made).value(), {.flags = kept->flags}, {}); !sent) return sent.error();
  return true;
}

Result<void> BatchServer::send(const PoolWork& work, MadeBatch made, PoolMarks marks,
                               const dataset::FetchClock::Times& times) {
  PoolResult result{.answer = AnswerKind::kBatch, .flags = marks.flags};
  result.batch = std::make_unique<SlabBatch>(std::move(made.sealed));
  if (result.batch->payload().size() > wire::kPoolPayloadBytesMax) {
    return Fault{Errc::kTooLarge, "a batch has " + std::to_string(result.batch->payload().size()) +
                                      " bytes, but a pool worker can send at most " +
                                      std::to_string(wire::kPoolPayloadBytesMax) + "; lower batch_size"};
  }
  result.state = std::move(marks.state);
  if (!work.is_recall()) result.sample_count = marks.sample_count;
  result.dataset_size = marks.dataset_size;
  result.may_be_kept = work.is_named && marks.may_be_kept;
  // A prefix may draw; its seeds follow from the epoch's.
  result.draws_nothing = result.may_be_kept && marks.draws_nothing && work.prefixes().empty();
  note_cost(work, result);
  result.prefix_time = wire::time_units(made.on_prefix);
  result.samples = times.in_units();
  source_.finish(std::move(result));
  return {};
}

void BatchServer::answer_end(const PoolWork& work) {
  PoolResult result{.answer = AnswerKind::kEnd};
  note_cost(work, result);
  source_.finish(std::move(result));
}

Result<void> BatchServer::answer_error(const PoolWork& work, const Failure& failure, std::vector<std::byte> state) {
  if (auto checked = check_state(state); !checked) return checked;
  PoolResult result{.answer = AnswerKind::kError};
  result.text = failure.type_name + '\0' + failure.text;
  result.text.resize(std::min(result.text.size(), wire::kPoolBodyBytesMax / 2));
  result.state = std::move(state);
  note_cost(work, result);
  source_.finish(std::move(result));
  return {};
}

void BatchServer::give_up() { source_.finish({.kind = PoolResult::Kind::kGivenUp}); }

void BatchServer::decline(std::string reason) {
  PoolResult result{.kind = PoolResult::Kind::kDeclined};
  result.text = std::move(reason);
  result.text.resize(std::min(result.text.size(), wire::kPoolBodyBytesMax / 2));
  source_.finish(std::move(result));
}

void BatchServer::leave(std::string reason) {
  PoolResult result{.kind = PoolResult::Kind::kHandedBack};
  result.text = std::move(reason);
  source_.finish(std::move(result));
}

Result<std::unique_ptr<PoolServer>> PoolServer::start(server::PoolServerOptions options) {
  const net::RunId run = net::draw_run_id(options.keys.own().public_key());
  if (options.numerics == Numerics{}) options.numerics = runtime::numeric_fingerprint();
  auto server = std::make_unique<PoolServer>(std::move(options), run);
  if (auto started = server->loop_.start(); !started) return started.error();
  if (server->options_.supervisor) server->options_.supervisor(ExitWord::kServing, {});
  return server;
}

PoolServer::PoolServer(server::PoolServerOptions options, const net::RunId& run)
    // All handed-over slabs may be with batches that follow the one that the trainer waits for.
    : BatchServer(exchange,
                  {.arena_bytes = options.arena_bytes,
                   .prefetch_factor = kBatchesAhead + kKeptBatchesMax,
                   .waits = options.handover.empty()},
                  exchange.is_closed()),
      options_(std::move(options)),
      worker_id_(run.id),
      io_(options_, run, exchange, &pool()),
      loop_("pk_pool_server", "which communicates with trainers", io_) {
  exchange.set_waker(loop_.waker());
}

PoolServer::~PoolServer() { close(); }

}  // namespace penstock::worker
