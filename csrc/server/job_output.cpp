// SPDX-License-Identifier: Apache-2.0
#include "server/job_output.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace penstock::server {

Result<JobOutput::Ends> JobOutput::open() {
  std::array<int, 2> fds{};
  if (::pipe2(fds.data(), O_CLOEXEC) != 0)
    return Fault{Errc::kNoMemory, std::string("opening a pipe for a job failed: ") + std::strerror(errno)};
  FileDescriptor here(fds[0]);
  FileDescriptor there(fds[1]);
  // Of this end alone: whoever writes at the other one waits, as at any pipe.
  ::fcntl(here.get(), F_SETFL, O_NONBLOCK);
  return Ends{.here = JobOutput(std::move(here)), .there = std::move(there)};
}

std::string JobOutput::read() {
  std::string text;
  while (pipe_ && text.size() < kOutputStepBytes) {
    std::array<char, 4096> piece{};
    const ssize_t count = ::read(pipe_.get(), piece.data(), piece.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) break;
    if (count <= 0) {
      pipe_.reset();
      break;
    }
    text.append(piece.data(), static_cast<size_t>(count));
  }
  tail_ += text;
  // One byte more, which tells whether its first line is whole.
  if (tail_.size() > kLastWordsBytesMax + 1) tail_.erase(0, tail_.size() - kLastWordsBytesMax - 1);
  return text;
}

std::string JobOutput::last_words() const {
  const bool is_whole = tail_.size() <= kLastWordsBytesMax;
  std::string words = tail_;
  while (!words.empty() && (words.back() == '\n' || words.back() == ' ')) words.pop_back();
  if (is_whole) return words;
  const size_t end = words.find('\n');
  return words.substr(end == std::string::npos ? std::min<size_t>(1, words.size()) : end + 1);
}

}  // namespace penstock::server
