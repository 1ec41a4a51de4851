// SPDX-License-Identifier: Apache-2.0
#include "server/job_host.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <new>

#include "base/child_process.h"
#include "base/clock.h"
#include "base/process.h"
#include "base/result.h"
#include "server/job_output.h"

namespace penstock::server {

using std::chrono::steady_clock;
using wire::FromJob;
using wire::ToJob;

namespace {

constexpr int kMessagesATurn = 64;  // of a job's process, before other events are handled
constexpr auto kUnsentInterval = std::chrono::milliseconds(2);
constexpr size_t kNoticesMax = 64;  // older ones are dropped

Fault wrong(const std::string& what) { return {Errc::kMalformed, "it sent an invalid message to its server: " + what}; }

// A batch in memory that a job's process has passed. Writes of the process to that memory can affect only its own
// batch.
class PassedBatch final : public HeldBatch {
 public:
  PassedBatch(std::shared_ptr<shm::ArenaView> view, const wire::SlabPlace& place, uint64_t payload_bytes,
              uint32_t record_bytes)
      : view_(std::move(view)), slab_index_(place.slab_index), generation_(place.generation) {
    hold({view_->slab(slab_index_), payload_bytes}, record_bytes);
  }
  ~PassedBatch() override { view_->release(slab_index_, generation_); }

 private:
  const std::shared_ptr<shm::ArenaView> view_;  // shared with the job while the job uses it
  const uint32_t slab_index_;
  const uint32_t generation_;
};

// A batch that arrived without a slab.
class CopiedBatch final : public HeldBatch {
 public:
  CopiedBatch(std::span<const std::byte> payload, uint32_t record_bytes) : bytes_(payload.begin(), payload.end()) {
    hold(bytes_, record_bytes);
  }

 private:
  const std::vector<std::byte> bytes_;
};

// Of another process; empty if it cannot be determined.
std::optional<std::chrono::nanoseconds> cpu_time_of(pid_t pid) {
  clockid_t clock{};
  timespec time{};
  if (pid <= 0 || ::clock_getcpuclockid(pid, &clock) != 0 || ::clock_gettime(clock, &time) != 0) return std::nullopt;
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

JobHost::JobHost(WarmSeat& warm, std::string log_name, const JobHostOptions& options)
    : warm_(warm), log_name_(std::move(log_name)), options_(options) {
  note_fds();
}

JobHost::~JobHost() = default;

// ---- For any thread

std::vector<std::string> JobHost::take_notices() {
  MutexLock lock(mutex_);
  return std::exchange(notices_, {});
}

std::string JobHost::take_output() {
  MutexLock lock(mutex_);
  std::string output = std::exchange(output_, {});
  if (const uint64_t bytes = std::exchange(left_out_, 0); bytes > 0)
    output += "\n[" + std::to_string(bytes) + " bytes of job output are omitted]\n";
  return output;
}

void JobHost::take_outputs() {
  if (job_ && job_->output.is_readable()) take_output_of(job_->output);
  if (parked_ && parked_->job.output.is_readable()) take_output_of(parked_->job.output);
  for (auto& [number, leaving] : leaving_)
    if (leaving.output.is_readable()) take_output_of(leaving.output);
}

void JobHost::take_output_of(JobOutput& output) {
  const std::string text = output.read();
  if (output.fd() < 0) note_fds();
  if (text.empty()) return;
  MutexLock lock(mutex_);
  const size_t taken = std::min(output_budget_.take(text.size(), clock_now()), kOutputBytesMax - output_.size());
  output_.append(text, 0, taken);
  left_out_ += text.size() - taken;
}

Standing JobHost::standing() const {
  MutexLock lock(mutex_);
  return standing_;
}

std::optional<Fault> JobHost::wait_closed(steady_clock::time_point deadline) {
  MutexLock lock(mutex_);
  while (!reason_) {
    if (!changed_.wait_until(mutex_, deadline) && !reason_) return std::nullopt;
  }
  return reason_;
}

void JobHost::wake() const {
  if (waker_ != nullptr) waker_->wake();
}

void JobHost::add_notice(std::string text) {
  MutexLock lock(mutex_);
  if (notices_.size() >= kNoticesMax) notices_.erase(notices_.begin());
  notices_.push_back(std::move(text));
}

void JobHost::set_standing(const Standing& standing) {
  trainer_id_ = standing.trainer_id;
  MutexLock lock(mutex_);
  standing_ = standing;
}

void JobHost::close(Fault reason) {
  is_closed_ = true;
  warm_.close();
  MutexLock lock(mutex_);
  if (!reason_) reason_ = std::move(reason);
  changed_.notify_all();
}

// ---- The work

Maker::Needs JobHost::take_needs() {
  Needs needs;
  if (is_closed_) return needs;
  const Instant now = clock_now();
  take_outputs();
  if (std::exchange(is_warm_readable_, false) || warm_.has_news()) take_news(needs);
  if (job_ && job_->end) job_->is_readable = true;  // messages sent before its end count
  receive(needs);
  if (job_ && job_->end && !is_held_back()) bury(format_end(*job_->end), needs);
  send_blob();
  if (std::exchange(is_given_up_, false)) needs.result = PoolResult{.kind = PoolResult::Kind::kGivenUp};
  note_idle(now);
  end_late(now, needs);
  const bool is_free = !job_ || (!job_->work && !job_->is_ahead_dropped && !job_->is_ending);
  needs.wants_work = !failure_ && is_free;
  if (job_ && job_->work && !job_->blob) needs.blob = job_->wish;
  needs.failure = failure_;
  return needs;
}

void JobHost::offer(std::shared_ptr<const PoolWork> work) {
  if (is_held_back() && job_->ahead == work) {
    job_->is_wanted = true;
    job_->work = std::exchange(job_->ahead, nullptr);
    if (job_->is_readable || job_->end) wake();
    return;
  }
  PENSTOCK_ASSERT(!job_ || !job_->ahead, "other work was already sent ahead");
  if (!job_ || job_->trainer_id != work->trainer_id) {
    std::optional<Job> kept;
    if (parked_ && parked_->job.trainer_id == work->trainer_id)
      kept = std::move(std::exchange(parked_, std::nullopt)->job);
    if (job_) park();
    if (kept) {
      job_ = std::move(kept);
      note_fds();
    } else {
      start(work->trainer_id);
    }
  }
  job_->is_wanted = true;
  job_->work = std::move(work);
  if (!job_->is_ending) post_work(*job_->work);  // otherwise it could not be started
}

bool JobHost::wants_ahead() const {
  return !failure_ && job_ && job_->work && !job_->ahead && job_->has_answered && job_->is_wanted && !job_->wish &&
         !job_->is_ending && !job_->end;
}

void JobHost::send_ahead(std::shared_ptr<const PoolWork> work) {
  PENSTOCK_ASSERT(wants_ahead() && work->trainer_id == job_->trainer_id);
  job_->ahead = std::move(work);
  post_work(*job_->ahead);
}

void JobHost::drop_ahead() {
  if (!job_ || !job_->ahead || std::exchange(job_->is_ahead_dropped, true)) return;
  if (job_->is_readable || job_->end) wake();
  if (job_->is_ending) return;
  if (auto posted = post({.kind = ToJob::Kind::kUnwanted, .key = job_->ahead->key}); !posted)
    kill(posted.error().message);
}

void JobHost::post_work(const PoolWork& made) {
  auto posted = post({.kind = ToJob::Kind::kWork,
                      .is_lane_start = made.is_lane_start,
                      .is_named = made.is_named,
                      .index_kind = made.index_kind,
                      .trainer_id = made.trainer_id,
                      .tenancy = made.tenancy,
                      .key = made.key,
                      .lane = made.lane,
                      .epoch_seed = made.epoch_seed,
                      .first_place = made.first_place,
                      .link_bytes_per_s = made.link_bytes_per_s,
                      .indices = made.indices,
                      .seeds = made.seeds,
                      .state = made.state,
                      .blobs = made.blobs});
  if (!posted) kill(posted.error().message);
}

void JobHost::set_wanted(bool is_wanted) {
  if (!job_ || !job_->work || job_->is_ending || job_->is_wanted == is_wanted) return;
  job_->is_wanted = is_wanted;
  if (auto posted = post({.kind = is_wanted ? ToJob::Kind::kWanted : ToJob::Kind::kUnwanted, .key = job_->work->key});
      !posted)
    kill(posted.error().message);
}

void JobHost::give_blob(const wire::BlobId& id, Result<std::vector<std::byte>> bytes) {
  if (!job_ || job_->is_ending || job_->wish != id || job_->blob) return;
  if (!bytes) {
    job_->wish.reset();
    if (auto posted = post({.kind = ToJob::Kind::kNoBlob,
                            .error = static_cast<uint8_t>(bytes.error().code),
                            .blobs = {&id, 1},
                            .body = std::as_bytes(std::span(bytes.error().message))});
        !posted)
      kill(posted.error().message);
    return;
  }
  job_->blob = OutgoingBlob{.bytes = std::move(bytes).value()};
  wake();
}

// A large blob is copied in steps, since trainers expect answers to their pings meanwhile.
void JobHost::send_blob() {
  if (!job_ || !job_->blob || job_->is_ending) return;
  OutgoingBlob& blob = *job_->blob;
  const wire::BlobId id = *job_->wish;
  Result<void> sent;
  if (blob.bytes.size() <= kInlineBlobBytesMax) {
    sent = post({.kind = ToJob::Kind::kBlob, .blobs = {&id, 1}, .body = blob.bytes});
  } else {
    if (!blob.file) blob.file = FileDescriptor(::memfd_create("penstock-blob", MFD_CLOEXEC));
    const uint64_t step = std::min(kBlobStepBytes, blob.bytes.size() - blob.written);
    const ssize_t count = blob.file ? ::write(blob.file.get(), blob.bytes.data() + blob.written, step) : -1;
    if (count < 0 && errno != EINTR) {
      const std::string why = std::strerror(errno);
      job_->blob.reset();
      return give_blob(id, Fault{Errc::kNoMemory, "a worker has insufficient memory for a part of the job: " + why});
    }
    if (count > 0) blob.written += static_cast<uint64_t>(count);
    wake();
    if (blob.written < blob.bytes.size()) return;
    const auto bytes =
        wire::write_to_job({.kind = ToJob::Kind::kBlobInFile, .blob_bytes = blob.bytes.size(), .blobs = {&id, 1}});
    const std::span<const std::byte> part(bytes);
    const int file = blob.file.get();
    const auto has_sent = job_->channel.try_send({&part, 1}, {&file, 1});
    if (!has_sent) {
      sent = has_sent.error();
    } else if (!has_sent.value()) {
      sent = wrong("it requested a part of its job and did not read it");
    }
  }
  job_->blob.reset();
  job_->wish.reset();
  if (!sent) kill(sent.error().message);
}

Result<void> JobHost::post(const ToJob& message) {
  const auto bytes = wire::write_to_job(message);
  const std::span<const std::byte> part(bytes);
  auto posted = job_->channel.post({&part, 1});
  // The process may just have ended; its end is reported with the cause.
  if (!posted && posted.error().code == Errc::kClosed) return {};
  return posted;
}

// ---- Messages of a job's process

void JobHost::receive(Needs& needs) {
  if (!job_ || job_->is_ending) return;
  try {
    receive_messages(needs);
  } catch (const std::bad_alloc&) {
    kill("its messages to the server exceeded the available memory");
  }
}

void JobHost::receive_messages(Needs& needs) {
  if (auto flushed = job_->channel.flush(); !flushed && flushed.error().code != Errc::kClosed)
    return kill(flushed.error().message);
  if (!std::exchange(job_->is_readable, false)) return;
  bool has_filled = false;
  for (int count = 0; count < kMessagesATurn && !job_->is_ending && !is_held_back(); ++count) {
    auto next = job_->channel.next();
    if (!next) return kill(next.error().message);
    if (!next.value()) {
      // After an answer no more messages are awaited: if there are any, the socket becomes readable again.
      if (std::exchange(has_filled, true) && !job_->work) return;
      const auto filled = job_->channel.fill();
      if (!filled && filled.error().code == Errc::kClosed) return note_hang_up();
      if (!filled) return kill(filled.error().message);
      if (!filled.value()) return;
      continue;
    }
    const auto message = wire::parse_from_job(next.value()->bytes);
    if (!message) return kill(message.error().message);
    if (auto taken = take_message(message.value(), next.value()->fds, needs); !taken)
      return kill(taken.error().message);
  }
  if (is_held_back()) {
    // The remaining messages are read once the work that they are about is offered or dropped.
    job_->is_readable = job_->channel.has_taken_in();
    return;
  }
  job_->is_readable = true;
  wake();
}

Result<void> JobHost::take_message(const FromJob& message, std::span<FileDescriptor> fds, Needs& needs) {
  const PoolWork* const work = job_->work ? job_->work.get() : job_->ahead.get();
  if (work == nullptr) return wrong("it answered without a request");
  if (message.key != work->key) return wrong("it answered another request");
  if (!fds.empty() && !message.place) return wrong("a message that mentions no file descriptors has some attached");
  if (message.kind == FromJob::Kind::kBlobRequest) {
    if (!job_->work) return {};  // it is about to read that the work is not wanted
    if (job_->blob) return wrong("it requested a part of its job while another is being sent");
    job_->wish = message.blob;
    return {};
  }
  const bool is_of_local_worker = message.kind == FromJob::Kind::kReady || message.kind == FromJob::Kind::kStates ||
                                  (message.flags & ~(wire::kPoolAnswerFlags | wire::kBatchKeepingFlags)) != 0 ||
                                  (message.answer == wire::AnswerKind::kEnd && !message.state.empty());
  if (is_of_local_worker) return wrong("it sent a message that only local workers send");
  auto result = result_of(message, fds);
  if (!result) return result.error();
  if (!job_->work) {
    job_->ahead.reset();
    job_->is_ahead_dropped = false;
    return {};  // the batch gives its slab back
  }
  needs.result = std::move(result).value();
  job_->has_answered = true;
  job_->work.reset();
  job_->wish.reset();
  job_->blob.reset();
  return {};
}

Result<PoolResult> JobHost::result_of(const FromJob& message, std::span<FileDescriptor> fds) {
  PoolResult result{.answer = message.answer,
                    .flags = static_cast<uint8_t>(message.flags & ~wire::kBatchKeepingFlags),
                    .text = text_of(message.text)};
  result.may_be_kept = (message.flags & wire::kBatchMayBeKept) != 0;
  result.draws_nothing = (message.flags & wire::kBatchDrawsNothing) != 0;
  if (message.kind == FromJob::Kind::kGivenUp) result.kind = PoolResult::Kind::kGivenUp;
  if (message.kind == FromJob::Kind::kDeclined) result.kind = PoolResult::Kind::kDeclined;
  result.state.assign(message.state.begin(), message.state.end());
  result.fetch_time = message.fetch_time;
  result.prefix_time = message.prefix_time;
  result.samples = message.samples;
  result.cpu_share = message.cpu_share;
  result.sample_count = message.sample_count;
  result.dataset_size = message.dataset_size;
  if (message.answer != wire::AnswerKind::kBatch) return result;
  if (message.place) {
    auto view = arena_of(*message.place, message.is_new_arena, fds);
    if (!view) return view.error();
    if (message.place->slab_index >= view.value()->slab_count() || message.payload_bytes > view.value()->slab_bytes())
      return wrong("its batch lies outside the memory that it passed");
    result.batch = std::make_unique<PassedBatch>(std::move(view).value(), *message.place, message.payload_bytes,
                                                 message.record_bytes);
    return result;
  }
  result.batch = std::make_unique<CopiedBatch>(message.payload, message.record_bytes);
  return result;
}

Result<std::shared_ptr<shm::ArenaView>> JobHost::arena_of(const wire::SlabPlace& place, bool is_new,
                                                          std::span<FileDescriptor> fds) {
  if (fds.size() > 1) return wrong("a batch was received with " + std::to_string(fds.size()) + " descriptors");
  if (is_new == fds.empty()) return wrong("a new arena and its file descriptor must be sent together");
  const auto found = job_->arenas.find(place.arena_id);
  if (fds.empty()) {
    if (found == job_->arenas.end()) return wrong("its batch lies in memory that it did not pass");
    return found->second;
  }
  auto view = shm::ArenaView::map(fds.front());
  if (!view || place.is_transient) return view;
  // Lasting arenas are used one at a time.
  job_->arenas.clear();
  job_->arenas.emplace(place.arena_id, view.value());
  return view;
}

// ---- The processes

void JobHost::start(uint64_t trainer_id) {
  auto ends = shm::Channel::open_pair();
  auto output = ends ? JobOutput::open() : Result<JobOutput::Ends>(ends.error());
  job_.emplace(Job{
      .trainer_id = trainer_id,
      .channel = shm::Channel(ends ? std::move(ends.value().here) : FileDescriptor(), wire::kFromJobMessageBytesMax)});
  job_->forked_at = clock_now();
  if (output) job_->output = std::move(output.value().here);
  const auto forked = output ? warm_.fork(ends.value().there.get(), output.value().there.get(), log_name_)
                             : Result<uint64_t>(output.error());
  note_fds();
  if (forked) {
    job_->number = forked.value();
    return;
  }
  // The trainer is notified as if the process had died, and repeats its request.
  failure_ = Fault{Errc::kNoMemory, "a job process could not be started: " + forked.error().message};
  job_->is_ending = true;
}

void JobHost::kill(std::string why) {
  if (job_->is_ending) return;
  job_->is_ending = true;
  job_->given_up_at = clock_now() + options_.end_grace;
  job_->fault = std::move(why);
  job_->channel.shut_down();
  static_cast<void>(warm_.end(job_->number));  // the warm process's end would be reported separately
  note_fds();
}

// The process has hung up, as it does when it ends: how it ended is reported shortly.
void JobHost::note_hang_up() {
  job_->is_ending = true;
  job_->killed_at = clock_now() + options_.end_grace;
  note_fds();
}

bool JobHost::end_work(const std::string& why) {
  if (!job_ || (!job_->work && !job_->ahead)) return false;
  if (!job_->is_ending) add_notice("ends a job process: " + why);
  kill(why);
  return true;
}

void JobHost::end_trainer(uint64_t trainer_id) {
  if (parked_ && parked_->job.trainer_id == trainer_id) release_parked();
  if (!job_ || job_->trainer_id != trainer_id || job_->is_ending) return;
  if (job_->work) is_given_up_ = true;
  let_go();
}

bool JobHost::has_process_of(uint64_t trainer_id) const {
  return (job_ && job_->trainer_id == trainer_id) || (parked_ && parked_->job.trainer_id == trainer_id);
}

void JobHost::let_go() {
  note_cpu_time(*job_);
  let_go(*std::exchange(job_, std::nullopt));
}

void JobHost::release_parked() { let_go(std::move(std::exchange(parked_, std::nullopt)->job)); }

void JobHost::let_go(Job job) {
  job.channel.shut_down();
  past_cpu_time_ += job.cpu_time;
  leaving_.emplace(job.number, Leaving{.channel = std::move(job.channel),
                                       .output = std::move(job.output),
                                       .due_at = clock_now() + options_.end_grace});
  note_fds();
}

// The CPU time that it uses while parked is counted once its trainer is back, not charged to another trainer.
void JobHost::park() {
  note_cpu_time(*job_);
  if (parked_) release_parked();
  parked_.emplace(Parked{.job = *std::exchange(job_, std::nullopt), .until = clock_now() + options_.parked});
  note_fds();
}

void JobHost::note_idle(Instant now) {
  const bool is_busy = job_ && (job_->work || job_->ahead || job_->is_ending);
  if (!job_ || is_busy || job_->trainer_id == trainer_id_) return idle_since_.reset();
  if (!idle_since_) idle_since_ = now;
  if (now - *idle_since_ < options_.linger) return;
  idle_since_.reset();
  if (trainer_id_ != 0) return park();
  let_go();
}

// SIGKILL takes effect only once the kernel returns, which may take long in a read from a file server that is gone, and
// a warm process that was stopped sends no signal.
void JobHost::end_late(Instant now, Needs& needs) {
  if (job_ && job_->killed_at && now >= *job_->killed_at) {
    job_->killed_at.reset();
    job_->given_up_at = now + options_.end_grace;
    job_->fault = "it closed the connection to its server and continued to run";
    static_cast<void>(warm_.end(job_->number));
  }
  if (job_ && job_->given_up_at && now >= *job_->given_up_at)
    bury("did not exit within " + format_duration(options_.end_grace) + " after its server killed it (" + job_->fault +
             "), and is abandoned",
         needs);
  // A parked process has no work: if it sends or hangs up, it is about to end or misbehaves.
  if (parked_ && (parked_->job.is_readable || now >= parked_->until)) release_parked();
  for (auto item = leaving_.begin(); item != leaving_.end();) {
    auto& [number, leaving] = *item;
    if (now >= leaving.due_at && leaving.is_killed) {
      item = leaving_.erase(item);
      note_fds();
      continue;
    }
    if (now >= leaving.due_at) {
      static_cast<void>(warm_.end(number));
      leaving.is_killed = true;
      leaving.due_at = now + options_.end_grace;
    }
    ++item;
  }
  if (is_forking() && now - job_->forked_at >= options_.fork_max) {
    failure_ = Fault{Errc::kFailed, "the process that forks job processes has not answered for " +
                                        format_duration(options_.fork_max) +
                                        ": it was stopped or hangs, and is killed with this worker"};
    note_fds();
  }
}

void JobHost::take_news(Needs& needs) {
  while (!failure_) {
    const auto news = warm_.next_news();
    if (!news) {
      failure_ = news.error();
      return note_fds();
    }
    if (!news.value()) break;
    const WarmProcess::News& told = *news.value();
    if (told.kind == wire::WarmMessage::Kind::kEnded) {
      take_end(told.job, told, needs);
    } else if (job_ && job_->number == told.job) {
      job_->pid = told.pid;
    }
  }
}

void JobHost::take_end(uint64_t number, const WarmProcess::News& news, Needs& needs) {
  if (const auto leaving = leaving_.find(number); leaving != leaving_.end()) {
    take_output_of(leaving->second.output);
    leaving_.erase(leaving);
    return note_fds();
  }
  if (parked_ && parked_->job.number == number) {
    take_output_of(parked_->job.output);
    past_cpu_time_ += parked_->job.cpu_time;
    parked_.reset();
    return note_fds();
  }
  // A process that was given up has ended after all.
  if (!job_ || job_->number != number) return;
  // Messages sent before its end count.
  job_->is_readable = true;
  receive(needs);
  if (is_held_back() && !job_->is_ending) {
    job_->end = news;
    return;
  }
  bury(format_end(news), needs);
}

std::string JobHost::format_end(const WarmProcess::News& news) const {
  if (news.pid == 0) return "could not be started; the system has no memory or process ids left";
  if (!job_->fault.empty()) return "was killed by its server: " + job_->fault;
  return ProcessEnd{.status = news.status}.describe();
}

void JobHost::bury(std::string how, Needs& needs) {
  past_cpu_time_ += job_->cpu_time;
  take_output_of(job_->output);
  if (const std::string words = job_->output.last_output(log_name_); !words.empty())
    how += "; its last output: " + words;
  if (job_->work) {
    PENSTOCK_ASSERT(!needs.result, "a result of work that is still queued");
    needs.result = PoolResult{.kind = PoolResult::Kind::kDied, .text = how};
  } else {
    needs.lost_process_of = job_->trainer_id;
  }
  add_notice("a job process of trainer " + format_id(job_->trainer_id).substr(0, 8) + " " + how);
  job_.reset();
  note_fds();
}

void JobHost::note_cpu_time(const Job& job) {
  if (!job.is_ending) job.cpu_time = std::max(job.cpu_time, cpu_time_of(job.pid).value_or(job.cpu_time));
}

std::chrono::nanoseconds JobHost::cpu_time() const {
  auto time = thread_cpu_time() + past_cpu_time_;
  if (parked_) time += parked_->job.cpu_time;
  if (!job_) return time;
  note_cpu_time(*job_);
  return time + job_->cpu_time;
}

std::optional<Instant> JobHost::due_at() const {
  std::optional<Instant> due;
  if (idle_since_) due = *idle_since_ + options_.linger;
  if (job_ && job_->killed_at) due = earlier(due, *job_->killed_at);
  if (job_ && job_->given_up_at) due = earlier(due, *job_->given_up_at);
  if (is_forking()) due = earlier(due, job_->forked_at + options_.fork_max);
  if (parked_) due = earlier(due, parked_->until);
  // There is no event for a channel that has room again.
  if (job_ && !job_->is_ending && job_->channel.has_unsent()) due = earlier(due, clock_now() + kUnsentInterval);
  for (const auto& [number, leaving] : leaving_) due = earlier(due, leaving.due_at);
  return due;
}

void JobHost::note_readable(std::span<const int> fds) {
  const auto note_output = [](int fd, JobOutput& output) {
    if (fd == output.fd()) output.note_readable();
  };
  const auto note_job = [&](int fd, Job& job) {
    if (fd == job.channel.fd()) job.is_readable = true;
    note_output(fd, job.output);
  };
  for (const int fd : fds) {
    if (fd == warm_.fd()) is_warm_readable_ = true;
    if (job_) note_job(fd, *job_);
    if (parked_) note_job(fd, parked_->job);
    for (auto& [number, leaving] : leaving_) note_output(fd, leaving.output);
  }
}

// A channel that has hung up stays readable forever.
void JobHost::note_fds() {
  fds_.clear();
  if (!failure_) fds_.push_back(warm_.fd());
  if (job_ && job_->output.fd() >= 0) fds_.push_back(job_->output.fd());
  if (parked_ && parked_->job.output.fd() >= 0) fds_.push_back(parked_->job.output.fd());
  for (const auto& [number, leaving] : leaving_)
    if (leaving.output.fd() >= 0) fds_.push_back(leaving.output.fd());
  if (parked_) fds_.push_back(parked_->job.channel.fd());
  if (job_ && !job_->is_ending) fds_.push_back(job_->channel.fd());
}

}  // namespace penstock::server
