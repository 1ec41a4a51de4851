// SPDX-License-Identifier: Apache-2.0
// A warm process and the processes of its jobs, without Python: both are played with the raw records of
// wire/job_record.h, rightly or wrongly.
//
// usage: warm_main WORD CHANNEL_FD
//
// WORD says what the warm process does. What the process of a job does is said by the state of its work.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/child_process.h"
#include "server/maker.h"
#include "shm/arena.h"
#include "shm/channel.h"
#include "warm_jobs.h"
#include "wire/job_record.h"
#include "wire/reports.h"

namespace penstock::server {
namespace {

using std::chrono::steady_clock;
using wire::AnswerKind;
using wire::FromJob;
using wire::SlabPlace;
using wire::ToJob;
using wire::WarmMessage;
using Bytes = std::span<const std::byte>;

constexpr uint32_t kArenaId = 3, kTransientArenaId = 4, kUnknownArenaId = 5, kOtherArenaId = 6;
constexpr std::chrono::milliseconds kSpun{20};
constexpr int kExitCode = 3, kExitCodeOfWarm = 7, kExitCodeBeforeReady = 9;

steady_clock::time_point far_away() { return steady_clock::now() + std::chrono::hours(1); }

// As of another installation; the version is at the same place in all records.
Bytes in_another_version(std::span<std::byte> record) {
  const uint16_t version = kOtherVersion;
  std::memcpy(record.data() + kVersionOffset, &version, sizeof version);
  return record;
}

[[noreturn]] void wait_for_ever() {
  for (;;) ::pause();
}

// ---- The process of a job

class Job {
 public:
  explicit Job(FileDescriptor socket) : channel_(std::move(socket)) {
    // Until it waits for it.
    sigset_t set;
    ::sigemptyset(&set);
    ::sigaddset(&set, SIGUSR1);
    ::sigprocmask(SIG_BLOCK, &set, nullptr);
  }

  int run() {
    for (;;) {
      const auto received = channel_.receive(far_away());
      if (!received) return EXIT_SUCCESS;  // the server has hung up
      const auto message = wire::parse_to_job(received.value().bytes).value();
      if (message.kind != ToJob::Kind::kWork) continue;
      key_ = message.key;
      blobs_.assign(message.blobs.begin(), message.blobs.end());
      const std::string word = to_text(message.state);
      if (word == "tell") {
        tell(format_work(message));
      } else {
        act(word);
      }
    }
  }

 private:
  void act(const std::string& word) {
    const std::map<std::string, std::function<void()>> acts{
        // As it should be.
        {"pid", [&] { tell(std::to_string(::getpid())); }},
        {"slab", [&] { answer_in_slab(); }},
        {"tell_slab", [&] { tell_slab(); }},
        {"transient", [&] { answer_in_arena_of_its_own(); }},
        {"hole", [&] { answer_at({.arena_id = kArenaId}); }},
        {"other_arena", [&] { answer_in_another_lasting_arena(); }},
        {"inline", [&] { answer_inline(); }},
        {"error", [&] { answer_error(); }},
        {"end", [&] { answer({.answer = AnswerKind::kEnd}); }},
        {"give_up", [&] { answer({.kind = FromJob::Kind::kGivenUp}); }},
        {"decline", [&] { answer({.kind = FromJob::Kind::kDeclined, .text = bytes_of("not here")}); }},
        {"heed", [&] { heed(); }},
        {"spin", [&] { spin(); }},
        {"until_signal", [&] { wait_for_signal(), tell("done"); }},
        {"await_unwanted", [&] { await(ToJob::Kind::kUnwanted), answer_in_slab(); }},
        {"wish", [&] { wish(0), tell(reply_to(0)); }},
        {"wish_two", [&] { wish(0), wish(1), tell(reply_to(1)); }},
        // It ends, or does not go on.
        {"exit", [&] { ::_exit(kExitCode); }},
        {"complain", [&] { complain(), ::_exit(kExitCode); }},
        {"segv", [&] { die_of_a_fault(); }},
        {"kill", [&] { ::raise(SIGKILL); }},
        {"answer_and_exit", [&] { tell("last words"), ::_exit(kExitCode); }},
        {"hang", [&] { wait_for_ever(); }},
        {"hang_up", [&] { channel_ = shm::Channel(FileDescriptor()), wait_for_ever(); }},
        // No process of a job does this.
        {"twice", [&] { tell("once"), tell("twice"); }},
        {"later", [&] { tell(std::to_string(::getpid())), wait_for_signal(), tell("later"); }},
        {"garbage", [&] { send(bytes_of("garbage")); }},
        {"another_version", [&] { answer_in_another_version(); }},
        {"no_message", [&] { send_raw(bytes_of("these are not the bytes of any message")); }},
        {"too_long", [&] { claim(wire::kFromJobMessageBytesMax + 1); }},
        {"other_slab", [&] { answer_at({.arena_id = kArenaId, .slab_index = 1}); }},
        {"long_batch", [&] { answer_at({.arena_id = kArenaId}, arena().slab_bytes() + 1); }},
        {"unknown_arena", [&] { answer(batch_at({.arena_id = kUnknownArenaId})); }},
        {"former_arena", [&] { answer(batch_at({.arena_id = kArenaId})); }},
        {"transient_again", [&] { answer(batch_at({.arena_id = kTransientArenaId, .is_transient = true})); }},
        {"two_descriptors", [&] { answer_with_two_descriptors(); }},
        {"descriptor_of_nothing", [&] { answer_end_with_a_descriptor(); }},
        {"descriptor_inline", [&] { answer_inline_with_a_descriptor(); }},
        {"unsealed", [&] { answer_in_memory_that_is_not_sealed(); }},
        {"other_work",
         [&] {
           say({.answer = AnswerKind::kEnd, .key = {key_.epoch, key_.sequence + 1}});
         }},
        {"old_arena_anew", [&] { answer_in_old_arena_anew(); }},
        {"state_of_an_end", [&] { answer({.answer = AnswerKind::kEnd, .state = bytes_of("a state")}); }},
        {"ready", [&] { answer({.kind = FromJob::Kind::kReady}); }},
        {"states", [&] { answer({.kind = FromJob::Kind::kStates, .state = bytes_of("a state")}); }},
        {"state_in_the_batch", [&] { answer_with_flags(wire::kBatchHasState); }},
        {"wish_again", [&] { wish(0), await(ToJob::Kind::kUnwanted), wish(0), wait_for_ever(); }},
        {"wish_unread", [&] { wish(0), wait_readable(), wish(1), wait_for_ever(); }},
    };
    const auto found = acts.find(word);
    if (found == acts.end()) return tell("the process does not know the word " + word);
    found->second();
  }

  static Bytes bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

  // ---- Messages

  void send(Bytes bytes) { static_cast<void>(channel_.send({&bytes, 1})); }
  void send_raw(Bytes bytes) { static_cast<void>(::send(channel_.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL)); }
  void claim(uint64_t bytes) {
    const shm::MessageHead head{.bytes = bytes};
    send_raw(std::as_bytes(std::span(&head, 1)));
  }
  void answer(FromJob message, Bytes payload = {}, std::span<const int> fds = {}) {
    message.key = key_;
    message.is_new_arena = message.place && !fds.empty();
    say(message, payload, fds);
  }
  void say(const FromJob& message, Bytes payload = {}, std::span<const int> fds = {}) {
    const auto head = wire::write_from_job(message);
    const Bytes parts[] = {head, payload};
    static_cast<void>(channel_.send(parts, fds));
  }
  void tell(const std::string& text) { answer({.answer = AnswerKind::kError, .text = bytes_of(text)}); }
  void answer_in_another_version() {
    auto bytes = wire::write_from_job({.answer = AnswerKind::kEnd});
    send(in_another_version(bytes));
  }
  void await(ToJob::Kind kind) {
    for (;;) {
      const auto received = channel_.receive(far_away());
      if (!received || wire::parse_to_job(received.value().bytes).value().kind == kind) return;
    }
  }
  void wait_readable() const {
    pollfd item{.fd = channel_.fd(), .events = POLLIN, .revents = 0};
    ::poll(&item, 1, -1);
  }

  static std::string format_work(const ToJob& work) {
    std::string text = "trainer " + std::to_string(work.trainer_id) + " tenancy " + std::to_string(work.tenancy) +
                       " epoch " + std::to_string(work.key.epoch) + " sequence " + std::to_string(work.key.sequence) +
                       " lane " + std::to_string(work.lane) + (work.is_lane_start ? " starts" : " goes on") +
                       " index kind " + std::to_string(static_cast<int>(work.index_kind)) + " seed " +
                       std::to_string(work.epoch_seed) + " place " + std::to_string(work.first_place) + " link " +
                       std::to_string(static_cast<uint64_t>(work.link_bytes_per_s)) + " indices " +
                       to_text(work.indices) + " seeds " + to_text(work.seeds) + " blobs";
    for (const wire::BlobId& id : work.blobs) text += " " + std::to_string(std::to_integer<int>(id.front()));
    return text;
  }

  void heed() {
    await(ToJob::Kind::kUnwanted);
    await(ToJob::Kind::kWanted);
    tell("unwanted, and wanted again");
  }

  static void wait_for_signal() {
    sigset_t set;
    ::sigemptyset(&set);
    ::sigaddset(&set, SIGUSR1);
    int number = 0;
    ::sigwait(&set, &number);
  }

  void spin() {
    const auto end = process_cpu_time() + kSpun;
    while (process_cpu_time() < end) {
    }
    answer({.answer = AnswerKind::kEnd});
  }

  static void complain() {
    constexpr std::string_view kWords = "there is no disk\n";
    static_cast<void>(::write(STDERR_FILENO, kWords.data(), kWords.size()) < 0);
  }

  [[noreturn]] static void die_of_a_fault() {
    ::prctl(PR_SET_DUMPABLE, 0);  // it leaves no core
    ::signal(SIGSEGV, SIG_DFL);   // a sanitizer has a handler of its own
    ::raise(SIGSEGV);
    ::_exit(EXIT_FAILURE);
  }

  // ---- Batches

  static FromJob batch() {
    return {.answer = AnswerKind::kBatch, .record_bytes = kMadeRecordBytes, .payload_bytes = made_batch().size()};
  }
  static FromJob batch_at(const SlabPlace& place) {
    FromJob message = batch();
    message.place = place;
    return message;
  }
  static std::shared_ptr<shm::Arena> make_arena(uint32_t id) {
    return shm::Arena::create({.slab_bytes = made_batch().size(), .slab_count = 1}, id).value();
  }
  shm::Arena& arena() {
    if (!arena_) arena_ = make_arena(kArenaId);
    return *arena_;
  }
  static SlabPlace fill(shm::Arena& arena) {
    auto slab = arena.try_acquire();
    for (; !slab; slab = arena.try_acquire()) arena.wait_for_release(std::chrono::seconds(1));
    if (!arena.reserve(*slab, made_batch().size())) ::_exit(EXIT_FAILURE);
    std::ranges::copy(made_batch(), arena.slab(*slab));
    return {.arena_id = arena.id(),
            .slab_index = *slab,
            .generation = arena.generation(*slab),
            .slab_bytes = arena.backed_bytes(*slab)};
  }

  void answer_in_slab() {
    const bool is_new = arena_ == nullptr;
    const SlabPlace place = fill(arena());
    const int fd = arena().fd();
    answer(batch_at(place), {}, std::span(&fd, is_new ? 1 : 0));
  }
  void tell_slab() {
    const auto slab = arena().try_acquire();
    if (slab) arena().cancel(*slab);
    tell(slab ? "free" : "held");
  }
  void answer_in_arena_of_its_own() {
    const auto arena = make_arena(kTransientArenaId);
    SlabPlace place = fill(*arena);
    place.is_transient = true;
    const int fd = arena->fd();
    answer(batch_at(place), {}, {&fd, 1});
  }
  void answer_in_another_lasting_arena() {
    const auto arena = make_arena(kOtherArenaId);
    const int fd = arena->fd();
    answer(batch_at(fill(*arena)), {}, {&fd, 1});
  }
  void answer_at(const SlabPlace& place, uint64_t payload_bytes = made_batch().size()) {
    FromJob message = batch_at(place);
    message.payload_bytes = payload_bytes;
    const int fd = arena().fd();
    answer(message, {}, {&fd, 1});
  }
  void answer_with_two_descriptors() {
    const int fds[] = {arena().fd(), arena().fd()};
    answer(batch_at({.arena_id = kArenaId}), {}, fds);
  }
  // Its descriptor does not come along.
  void answer_in_old_arena_anew() {
    FromJob message = batch_at(fill(arena()));
    message.key = key_;
    message.is_new_arena = true;
    say(message);
  }
  void answer_with_flags(uint8_t flags) {
    FromJob message = batch();
    message.flags = flags;
    answer(message, made_batch());
  }
  void answer_end_with_a_descriptor() {
    const int fd = arena().fd();
    answer({.answer = AnswerKind::kEnd}, {}, {&fd, 1});
  }
  void answer_inline_with_a_descriptor() {
    const int fd = arena().fd();
    answer(batch(), made_batch(), {&fd, 1});
  }
  void answer_in_memory_that_is_not_sealed() {
    const FileDescriptor file(::memfd_create("penstock-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    std::vector<std::byte> bytes(1 << 16);
    static_cast<void>(::write(file.get(), bytes.data(), bytes.size()) < 0);
    const int fd = file.get();
    answer(batch_at({.arena_id = kArenaId}), {}, {&fd, 1});
  }
  void answer_inline() {
    FromJob message = batch();
    message.flags = wire::kBatchThreadsDrew | wire::kBatchCompiled;
    message.cpu_share = 64;
    message.fetch_time = 11;
    message.prefix_time = 12;
    message.samples = {.dataset_time = 13, .slowest_place = 14, .slowest_share = 15};
    message.sample_count = 16;
    message.dataset_size = 17;
    message.state = bytes_of("the state after it");
    answer(message, made_batch());
  }
  void answer_error() {
    answer({.answer = AnswerKind::kError,
            .text = bytes_of(std::string_view("ValueError\0no sample 7", 22)),
            .state = bytes_of("the state after it")});
  }

  // ---- Blobs

  void wish(size_t place) { answer({.kind = FromJob::Kind::kBlobRequest, .blob = blobs_.at(place)}); }

  // What the server sends for it, in words.
  std::string reply_to(size_t place) {
    for (;;) {
      const auto received = channel_.receive(far_away());
      if (!received) ::_exit(EXIT_SUCCESS);
      const auto message = wire::parse_to_job(received.value().bytes).value();
      if (message.kind == ToJob::Kind::kUnwanted || message.kind == ToJob::Kind::kWanted) continue;
      if (message.blobs.size() != 1 || message.blobs.front() != blobs_.at(place)) return "a reply about another blob";
      if (message.kind == ToJob::Kind::kBlob) return "inline, " + format_blob(message.body);
      if (message.kind == ToJob::Kind::kNoBlob)
        return "none, " + std::string(errc_name(static_cast<Errc>(message.error))) + ": " + to_text(message.body);
      if (message.kind != ToJob::Kind::kBlobInFile || received.value().fds.size() != 1) return "no reply";
      return "in a file, " + format_blob(file_bytes(received.value().fds.front().get(), message.blob_bytes));
    }
  }
  static std::string format_blob(Bytes bytes) {
    return std::ranges::equal(bytes, made_blob(bytes.size())) ? std::to_string(bytes.size()) + " bytes" : "other bytes";
  }
  // Nothing where the file is not of that size.
  static std::vector<std::byte> file_bytes(int fd, uint64_t size) {
    struct stat status {};
    if (::fstat(fd, &status) != 0 || static_cast<uint64_t>(status.st_size) != size) return {};
    std::vector<std::byte> bytes(size);
    for (size_t done = 0; done < size;) {
      const ssize_t count = ::pread(fd, bytes.data() + done, size - done, static_cast<off_t>(done));
      if (count <= 0) return {};
      done += static_cast<size_t>(count);
    }
    return bytes;
  }

  shm::Channel channel_;
  std::shared_ptr<shm::Arena> arena_;  // as shm::Arena::create() gives it
  std::vector<wire::BlobId> blobs_;
  wire::BatchKey key_{};  // of the work
};

// ---- The warm process

class Warm {
 public:
  Warm(FileDescriptor socket, std::string word) : channel_(std::move(socket)), word_(std::move(word)) {}

  int run() {
    if (word_ == "ends_at_once") return kExitCodeBeforeReady;
    if (word_ == "is_never_ready") {
      static_cast<void>(channel_.receive(far_away()));  // until the server is gone
      return EXIT_SUCCESS;
    }
    if (word_ == "begins_in_another_version") {
      is_of_another_version_ = true;
      send_ready();
    } else if (word_ == "begins_wrongly") {
      send({.kind = WarmMessage::Kind::kStarted, .job = 1, .pid = 1});
    } else {
      send_ready();
    }
    while (serve()) {
    }
    end_all();
    return EXIT_SUCCESS;
  }

 private:
  // False once the server is gone.
  bool serve() {
    reap();
    const auto next = channel_.next();
    if (!next) return false;
    if (next.value()) {
      take(*next.value());
      return true;
    }
    const auto filled = channel_.fill();
    if (filled && !filled.value()) wait();
    return static_cast<bool>(filled);
  }

  void take(shm::Channel::Message message) {
    const auto order = wire::parse_warm_message(message.bytes).value();
    if (order.kind == WarmMessage::Kind::kFork) return fork(order.job, std::move(message.fds[0]), message.fds[1]);
    if (word_ == "ends_no_process") return;
    const auto process = processes_.find(order.job);
    if (process != processes_.end()) end_session(process->second);
  }

  void fork(uint64_t job, FileDescriptor socket, const FileDescriptor& errors) {
    if (word_ == "cannot_fork") return send({.kind = WarmMessage::Kind::kEnded, .job = job});
    if (word_ == "leaves") ::_exit(kExitCodeOfWarm);
    if (word_ == "says_it_again") return send_ready();
    is_of_another_version_ = word_ == "goes_on_in_another_version";
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::setsid();
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::dup2(errors.get(), STDERR_FILENO);
      channel_ = shm::Channel(FileDescriptor());
      ::_exit(Job(std::move(socket)).run());
    }
    processes_.emplace(job, pid);
    send({.kind = WarmMessage::Kind::kStarted, .job = job, .pid = pid});
  }

  void reap() {
    for (auto process = processes_.begin(); process != processes_.end();) {
      const auto [job, pid] = *process;
      int status = 0;
      if (::waitpid(pid, &status, WNOHANG) != pid) {
        ++process;
        continue;
      }
      process = processes_.erase(process);
      send({.kind = WarmMessage::Kind::kEnded, .job = job, .pid = pid, .status = status});
    }
  }

  // Until the server says something, or a process ends.
  void wait() {
    std::vector<FileDescriptor> handles;
    std::vector<pollfd> items{{.fd = channel_.fd(), .events = POLLIN, .revents = 0}};
    for (const auto& [job, pid] : processes_) {
      handles.push_back(open_process_handle(pid));
      items.push_back({.fd = handles.back().get(), .events = POLLIN, .revents = 0});
    }
    constexpr int kLookMs = 10;  // where the system gives no handles
    const bool has_all = std::ranges::all_of(handles, [](const FileDescriptor& handle) { return bool(handle); });
    ::poll(items.data(), items.size(), has_all ? -1 : kLookMs);
  }

  static void end_session(pid_t pid) {
    ::kill(-pid, SIGKILL);
    ::kill(pid, SIGKILL);
  }

  void end_all() {
    for (const auto& [job, pid] : processes_) end_session(pid);
    for (const auto& [job, pid] : processes_) ::waitpid(pid, nullptr, 0);
  }

  void send_ready() {
    send({.kind = WarmMessage::Kind::kReady,
          .torch = 0x020f,
          .job_kinds = wire::kind_bit(wire::JobKind::kPlugin),
          .numerics = {1, 2, 3},
          .text = "a warm process of tests"});
  }
  void send(const WarmMessage& message) {
    auto bytes = wire::write_warm_message(message);
    const Bytes part = is_of_another_version_ ? in_another_version(bytes) : Bytes(bytes);
    static_cast<void>(channel_.send({&part, 1}));
  }

  shm::Channel channel_;
  const std::string word_;
  bool is_of_another_version_ = false;
  std::map<uint64_t, pid_t> processes_;  // by job
};

}  // namespace
}  // namespace penstock::server

int main(int argument_count, char** arguments) {
  if (argument_count != 3) return EXIT_FAILURE;
  penstock::FileDescriptor socket(std::atoi(arguments[2]));  // NOLINT(cert-err34-c): a number of this test's own
  ::fcntl(socket.get(), F_SETFD, FD_CLOEXEC);
  return penstock::server::Warm(std::move(socket), arguments[1]).run();
}
