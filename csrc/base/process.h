// SPDX-License-Identifier: Apache-2.0
#pragma once
// The running process. ProcessBound keeps an object from being used or destroyed in a forked child. The rest is the
// process's environment and log, its limits of files and memory, its exceptions as text, and the ids by which it is
// known to others.

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"

namespace penstock {

// A pointer to an object that belongs to one process: threads, sockets, locks. A forked child inherits the bytes but
// none of the threads, so destroying its copy would join a thread that does not exist or use the parent's sockets. In
// any process other than the creator, the object is left alone and dies with the process. Thread-compatible.
template <typename T>
class ProcessBound {
 public:
  ProcessBound(std::unique_ptr<T> object) : object_(std::move(object)), owner_pid_(::getpid()) {}
  ProcessBound(const ProcessBound&) = delete;
  ProcessBound& operator=(const ProcessBound&) = delete;
  ~ProcessBound() {
    if (!is_owner()) static_cast<void>(object_.release());
  }

  bool is_owner() const { return owner_pid_ == ::getpid(); }
  T* operator->() const { return object_.get(); }
  T& operator*() const { return *object_; }

 private:
  std::unique_ptr<T> object_;
  pid_t owner_pid_;
};

// The value of an environment variable; none if it is not set. This process must not set variables while other threads
// read them.
std::optional<std::string> environment(const char* variable);

// For the start of a thread that this library has started for itself: names the calling thread, in up to 15 characters,
// and leaves signals to the program's threads. Python notices a signal late that another thread has received.
void begin_own_thread(const char* name);

// The name of this machine, for display.
std::string host_name();

// The log lines of a worker process, in the format of `penstock worker`: time, process, event. Confined to the main
// thread.
class ProcessLog {
 public:
  // `name` names the process, such as "penstock-worker 3f2a".
  explicit ProcessLog(std::string name);

  void set_name(std::string name) { name_ = std::move(name); }
  // Logs good news on standard output.
  void say(const std::string& text) const;
  // Logs a problem that needs attention on standard error.
  void tell(const std::string& text) const;

 private:
  void write(int fd, const std::string& text) const;

  std::string name_;
  std::string host_;
};

// The limit of open files to which a server process raises its own: more than any process of a pool needs. Programs
// that a dataset starts inherit the limit, and some of them close every descriptor up to it at startup: with the limit
// of 1,000,000,000 in some containers that takes minutes.
constexpr uint64_t kDescriptorLimitMax = 1 << 20;
// Below this limit a server process warns: it keeps fewer connections that have shown no key (net/stranger_guard.h),
// and a large pool has more members than the process has descriptors.
constexpr uint64_t kDescriptorLimitMin = 4096;

// The soft limit of open files of a process. A server process needs one descriptor per connection, including
// connections of strangers that never show a key; files that a dataset opens count against the same limit. The usual
// soft limit of 1,024 is meant for programs that call select(); the hard limit is the machine's.
struct DescriptorLimit {
  uint64_t before = 0;
  uint64_t now = 0;
};
// Raises this process's soft limit to its hard limit, but at most to kDescriptorLimitMax. Only for penstock's server
// processes: a training program keeps its limit.
DescriptorLimit raise_descriptor_limit();
// Log lines: that the limit has changed, and that it is still too low.
std::vector<std::string> format_limit(const DescriptorLimit& limit);

// The soft limit of this process; 0 if the system does not report it.
uint64_t descriptor_limit();

// ZeroMQ allocates each message that it receives, and frees it soon after. glibc returns the pages of such blocks to
// the kernel and gets others for the next message, at one page fault each, unless a larger block was freed before:
// freeing a mapped block of up to 32 MB raises the sizes from which glibc maps blocks and trims heaps (mallopt(3),
// M_MMAP_THRESHOLD), which most programs do sooner or later.
//
// Frees such a block, so that messages reuse the same memory. Has no effect if the user has set glibc's thresholds, or
// with another allocator. Thread-safe.
void raise_heap_thresholds();

// The type of the current exception as written in C++: "std::out_of_range". Call it in a catch block.
std::string current_exception_name();
// The message of the current exception.
std::string current_exception_text();

// Draws the id of one run of a controller, a worker or a trainer: 64 random bits from the system; never 0, which means
// no process.
Result<uint64_t> draw_identity();

// An id as its 16 hexadecimal digits.
std::string format_id(uint64_t id);

// A name for a socket on this machine that cannot be guessed: 128 random bits after a readable prefix.
std::string make_endpoint_name();

}  // namespace penstock
