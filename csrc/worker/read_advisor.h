// SPDX-License-Identifier: Apache-2.0
#pragma once
// Has the kernel read files ahead of a worker. A worker knows the samples of its next batches, and where the dataset
// has a list of files, their files. Their reads then overlap with each other and with the work on earlier samples.
//
// Files whose start is in the page cache are left alone, and while all files are, only a few are checked.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace penstock::worker {

// Thread-safe. Neither advise() nor the destructor waits for storage: a thread inside a slow call is left to end by
// itself.
class ReadAdvisor {
 public:
  // Threads start with the first path.
  explicit ReadAdvisor(size_t thread_count = 8);
  ReadAdvisor(const ReadAdvisor&) = delete;
  ReadAdvisor& operator=(const ReadAdvisor&) = delete;
  ~ReadAdvisor();

  // The files are read soon, in this order. Paths that do not name a file are ignored. If too many wait, the oldest are
  // dropped.
  void advise(std::vector<std::string> paths);

  struct Counts {
    uint64_t checked = 0;  // files
    uint64_t cold = 0;     // of these, files that the kernel was asked to read
  };
  Counts counts() const;

 private:
  struct Shared;

  std::shared_ptr<Shared> shared_;
  size_t thread_count_;
};

}  // namespace penstock::worker
