// SPDX-License-Identifier: Apache-2.0
#include "api/worker_service.h"

#include <chrono>
#include <list>
#include <memory>
#include <utility>

#include "api/blob_id.h"
#include "api/native_job.h"
#include "base/identity.h"
#include "penstock/error.h"

namespace penstock::api {

using server::PoolWork;
using std::chrono::steady_clock;
using worker::BatchServer;

namespace {

constexpr auto kNoticeInterval = std::chrono::milliseconds(500);
constexpr auto kBlobWait = std::chrono::seconds(60);
constexpr size_t kJobCountMax = 2;  // for two loaders that a trainer uses in turn

std::string short_id(uint64_t id) { return spoken_id(id).substr(0, 8); }

// A worker's jobs and prefixes, which it fetches from its trainer as blobs, and its log lines about changes.
class Service {
 public:
  Service(BatchServer& server, const WorkerSpeech& speech) : server_(server), speech_(speech) {}

  Result<void> run() {
    for (;;) {
      auto work = server_.next(steady_clock::now() + kNoticeInterval);
      for (const std::string& notice : server_.take_notices()) speech_.tell(notice);
      if (!work && work.error().code == Errc::kTimeout) continue;
      auto done = work ? answer(*work.value()) : Result<void>(work.error());
      if (done) continue;
      finish_service();
      for (const std::string& notice : server_.take_notices()) speech_.tell(notice);
      return done.error().code == Errc::kClosed ? Result<void>() : done;
    }
  }

 private:
  // A job of one trainer: its dataset may have changed since it was opened, and only that trainer's program may see the
  // changes.
  struct OpenJob {
    uint64_t trainer_id;
    wire::BlobId id;
    std::unique_ptr<NativeJob> job;
  };
  using Jobs = std::list<OpenJob>;  // most recently used first

  Result<void> answer(const PoolWork& work) {
    auto job = job_of(work);
    if (!job) return refuse(work, job.error());
    if (auto fetched = fetch_prefixes(work); !fetched) return refuse(work, fetched.error());
    note_batch(work.trainer_id, job.value()->name());
    return job.value()->answer(server_, work);
  }

  // A trainer that lacks a part has abandoned the request; a job that cannot run here is declined.
  Result<void> refuse(const PoolWork& work, const Fault& why) {
    if (why.code == Errc::kClosed) {
      server_.give_up();
      return {};
    }
    finish_service();
    speech_.say("refuses trainer " + short_id(work.trainer_id) + ": " + why.message);
    server_.decline(why.message);
    return {};
  }

  Result<NativeJob*> job_of(const PoolWork& work) {
    if (work.blobs.empty()) {
      return Fault{Errc::kUnsupported,
                   "a batch was requested without its job; install the same version of penstock on both"};
    }
    const wire::BlobId& id = work.blobs[0];
    for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
      if (job->trainer_id != work.trainer_id || job->id != id) continue;
      jobs_.splice(jobs_.begin(), jobs_, job);
      return job->job.get();
    }
    while (jobs_.size() >= kJobCountMax) jobs_.pop_back();  // first: there may be no memory for one more
    const auto blob = fetch(id);
    if (!blob) return blob.error();
    auto opened = NativeJob::open(blob.value(), [this](const wire::BlobId& part) { return fetch(part); });
    if (!opened) return opened.error();
    jobs_.push_front({work.trainer_id, id, std::move(opened).value()});
    return jobs_.front().job.get();
  }

  Result<void> fetch_prefixes(const PoolWork& work) {
    for (const wire::BlobId& id : work.prefixes()) {
      if (server_.prefixes().has(id)) continue;
      const auto message = fetch(id);
      // A prefix that the trainer no longer has counts as empty: the trainer runs it itself.
      if (!message && message.error().code != Errc::kUnsupported) return message.error();
      server_.prefixes().put(id, message ? std::span<const std::byte>(message.value()) : std::span<const std::byte>());
    }
    return {};
  }

  Result<std::vector<std::byte>> fetch(const wire::BlobId& id) {
    for (;;) {
      auto blob = server_.blob(id, steady_clock::now() + kBlobWait);
      if (!blob && blob.error().code == Errc::kTimeout) continue;
      if (!blob || blob_id_of(blob.value()) == id) return blob;
      return Fault{Errc::kMalformed,
                   "the trainer sent another part of a job than it announced; trainer and workers must run the same "
                   "version of penstock"};
    }
  }

  // ---- The log

  void note_batch(uint64_t trainer_id, const std::string& job) {
    if (trainer_id != trainer_id_ || job != job_name_) {
      finish_service();
      trainer_id_ = trainer_id;
      job_name_ = job;
      speech_.say("serves " + job + " of trainer " + short_id(trainer_id));
    }
    ++batch_count_;
  }

  void finish_service() {
    if (trainer_id_ == 0) return;
    speech_.say("has finished " + job_name_ + " of trainer " + short_id(trainer_id_) + ": " +
                std::to_string(batch_count_) + (batch_count_ == 1 ? " batch" : " batches"));
    trainer_id_ = 0;
    batch_count_ = 0;
  }

  BatchServer& server_;
  const WorkerSpeech& speech_;
  Jobs jobs_;
  uint64_t trainer_id_ = 0;
  std::string job_name_;
  uint64_t batch_count_ = 0;
};

}  // namespace

Result<void> serve_jobs(BatchServer& server, const WorkerSpeech& speech) { return Service(server, speech).run(); }

}  // namespace penstock::api
