// SPDX-License-Identifier: Apache-2.0
#include "worker/read_advisor.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <deque>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "base/process.h"

namespace penstock::worker {

namespace {

constexpr size_t kWaitingMax = 8192;  // paths
// After so many files in a row that were in memory, one of kCheckedOf is checked.
constexpr uint64_t kWarmRun = 256;
constexpr uint64_t kCheckedOf = 16;

// Whether the first page of a file is in memory; true also where that cannot be determined for a file that this process
// may not write to.
bool is_in_memory(int fd) {
  std::byte first;
  const iovec part{.iov_base = &first, .iov_len = 1};
  const ssize_t read = ::preadv2(fd, &part, 1, 0, RWF_NOWAIT);
  if (read >= 0) return true;
  if (errno == EAGAIN) return false;
  // The file system has no such read.
  void* const page = ::mmap(nullptr, 1, PROT_READ, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) return true;
  unsigned char resident = 1;
  const bool is_known = ::mincore(page, 1, &resident) == 0;
  ::munmap(page, 1);
  return !is_known || (resident & 1) != 0;
}

}  // namespace

struct ReadAdvisor::Shared {
  Mutex mutex;
  Condition changed;
  std::deque<std::string> waiting PENSTOCK_GUARDED_BY(mutex);
  size_t started PENSTOCK_GUARDED_BY(mutex) = 0;
  bool is_over PENSTOCK_GUARDED_BY(mutex) = false;
  uint64_t skipped PENSTOCK_GUARDED_BY(mutex) = 0;  // since the last one that was checked
  std::atomic<uint64_t> warm_run = 0;
  std::atomic<uint64_t> checked = 0;
  std::atomic<uint64_t> cold = 0;

  void work() {
    begin_own_thread("pk_read_ahead");
    while (const auto path = next()) check(*path);
  }

  // The next path; none once this object is over. Blocks.
  std::optional<std::string> next() {
    const MutexLock lock(mutex);
    while (!is_over && waiting.empty()) changed.wait(mutex);
    if (is_over) return std::nullopt;
    std::string path = std::move(waiting.front());
    waiting.pop_front();
    return path;
  }

  void check(const std::string& path) {
    const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    struct stat about {};
    if (file.get() < 0 || ::fstat(file.get(), &about) != 0 || !S_ISREG(about.st_mode) || about.st_size == 0) return;
    checked.fetch_add(1);
    if (is_in_memory(file.get())) {
      warm_run.fetch_add(1);
      return;
    }
    warm_run.store(0);
    cold.fetch_add(1);
    ::posix_fadvise(file.get(), 0, 0, POSIX_FADV_WILLNEED);
  }
};

ReadAdvisor::ReadAdvisor(size_t thread_count) : shared_(std::make_shared<Shared>()), thread_count_(thread_count) {}

ReadAdvisor::~ReadAdvisor() {
  {
    const MutexLock lock(shared_->mutex);
    shared_->is_over = true;
    shared_->waiting.clear();
  }
  shared_->changed.notify_all();
}

void ReadAdvisor::advise(std::vector<std::string> paths) {
  const MutexLock lock(shared_->mutex);
  for (std::string& path : paths) {
    if (shared_->warm_run.load() >= kWarmRun && ++shared_->skipped % kCheckedOf != 0) continue;
    shared_->waiting.push_back(std::move(path));
  }
  while (shared_->waiting.size() > kWaitingMax) shared_->waiting.pop_front();
  while (shared_->started < thread_count_ && shared_->started < shared_->waiting.size()) {
    std::thread([shared = shared_] { shared->work(); }).detach();
    ++shared_->started;
  }
  shared_->changed.notify_all();
}

ReadAdvisor::Counts ReadAdvisor::counts() const {
  return {.checked = shared_->checked.load(), .cold = shared_->cold.load()};
}

}  // namespace penstock::worker
