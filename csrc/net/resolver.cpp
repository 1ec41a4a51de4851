// SPDX-License-Identifier: Apache-2.0
#include "net/resolver.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <new>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "base/exception_name.h"
#include "base/file_descriptor.h"
#include "base/live_clock.h"
#include "base/mutex.h"

namespace penstock::net {

struct Resolver::State {
  struct Answer {
    std::optional<Result<HostAddress>> address{};  // none before the first lookup
    Instant at{};

    bool is_fresh(Instant now) const { return address && now - at < (*address ? kAddressKept : kFailureKept); }
  };

  State(Lookup function, FileDescriptor descriptor) : lookup(std::move(function)), fd(std::move(descriptor)) {}

  const Lookup lookup;
  const FileDescriptor fd;
  Mutex mutex;
  bool is_closed PENSTOCK_GUARDED_BY(mutex) = false;
  size_t thread_count PENSTOCK_GUARDED_BY(mutex) = 0;
  std::set<std::string> asked PENSTOCK_GUARDED_BY(mutex);            // hosts that wait for an answer
  std::deque<std::string> waiting PENSTOCK_GUARDED_BY(mutex);        // those of them without a thread yet
  std::map<std::string, Answer> answers PENSTOCK_GUARDED_BY(mutex);  // with an entry for each host in `asked`
  std::set<std::string> done PENSTOCK_GUARDED_BY(mutex);

  void make_place(const std::string& host, Instant now) PENSTOCK_REQUIRES(mutex);
  void note(const std::string& host, Result<HostAddress> address) noexcept PENSTOCK_REQUIRES(mutex);
};

namespace {

using SharedState = std::shared_ptr<Resolver::State>;

Result<HostAddress> guarded_lookup(const Resolver::Lookup& lookup, const std::string& host) noexcept {
  Fault failure{.code = Errc::kFailed, .message = {}};
  try {
    try {
      return lookup(host);
    } catch (...) {
      failure.message = current_exception_text();
    }
  } catch (const std::bad_alloc&) {
    failure.message = "no memory";  // short enough to need no allocation
  }
  return Result<HostAddress>(std::move(failure));
}

// Looks up one host after the other until the queue is empty. An exception that left the thread would terminate the
// program, so only the lookup allocates.
void run(const SharedState& state, std::string host) {
  ::pthread_setname_np(::pthread_self(), "pk_lookup");
  // Signals are for the program's threads.
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
  for (;;) {
    auto address = guarded_lookup(state->lookup, host);
    const MutexLock lock(state->mutex);
    if (!state->is_closed) state->note(host, std::move(address));
    if (state->is_closed || state->waiting.empty()) {
      --state->thread_count;
      return;
    }
    host = std::move(state->waiting.front());
    state->waiting.pop_front();
  }
}

}  // namespace

// Makes room for the host's answer, so that note() does not allocate. Keeps the entries of hosts that wait for an
// answer.
void Resolver::State::make_place(const std::string& host, Instant now) {
  const bool is_full = answers.size() >= kKnownHostCountMax;
  for (auto at = answers.begin(); is_full && at != answers.end();) {
    const auto answer = at++;
    if (!answer->second.is_fresh(now) && !asked.contains(answer->first)) answers.erase(answer);
  }
  for (auto at = answers.begin(); answers.size() >= kKnownHostCountMax && at != answers.end();) {
    const auto answer = at++;
    if (!asked.contains(answer->first)) answers.erase(answer);
  }
  answers.try_emplace(host);
}

void Resolver::State::note(const std::string& host, Result<HostAddress> address) noexcept {
  Answer& answer = answers.at(host);
  answer.address = std::move(address);
  answer.at = clock_now();
  done.insert(asked.extract(host));
  const uint64_t one = 1;
  static_cast<void>(!::write(fd.get(), &one, sizeof one));
}

Result<std::unique_ptr<Resolver>> Resolver::open(Lookup lookup) {
  FileDescriptor descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!descriptor) {
    return Fault{Errc::kNoMemory, std::string("host names cannot be resolved: no file descriptor is left (") +
                                      std::strerror(errno) + "); raise the limit of open files (ulimit -n)"};
  }
  return std::make_unique<Resolver>(std::make_shared<State>(std::move(lookup), std::move(descriptor)));
}

Resolver::Resolver(std::shared_ptr<State> state) : state_(std::move(state)) {}

Resolver::~Resolver() {
  const MutexLock lock(state_->mutex);
  state_->is_closed = true;
}

std::optional<Result<HostAddress>> Resolver::try_resolve(const std::string& host, Instant now) {
  if (const auto address = address_of_number(host)) return *address;
  const MutexLock lock(state_->mutex);
  if (const auto found = state_->answers.find(host); found != state_->answers.end() && found->second.is_fresh(now))
    return found->second.address;
  if (!state_->asked.insert(host).second) return std::nullopt;
  state_->make_place(host, now);
  if (state_->thread_count >= kLookupCountMax) {
    state_->waiting.push_back(host);
    return std::nullopt;
  }
  try {
    std::thread([state = state_, host]() mutable { run(state, std::move(host)); }).detach();
    ++state_->thread_count;
  } catch (const std::system_error& error) {
    state_->note(host,
                 Fault{Errc::kNoMemory, std::string("no thread could be started to resolve it: ") + error.what()});
  }
  return std::nullopt;
}

int Resolver::fd() const { return state_->fd.get(); }

std::vector<std::string> Resolver::take_done() {
  uint64_t count = 0;
  static_cast<void>(!::read(state_->fd.get(), &count, sizeof count));
  const MutexLock lock(state_->mutex);
  const std::set<std::string> done = std::exchange(state_->done, {});
  return {done.begin(), done.end()};
}

}  // namespace penstock::net
