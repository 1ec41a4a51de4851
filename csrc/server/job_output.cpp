// SPDX-License-Identifier: Apache-2.0
#include "server/job_output.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>

namespace penstock::server {
namespace {

// Without empty lines, and without what stands around each.
std::string in_one_line(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r";
  std::string joined;
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    line.remove_prefix(std::min(line.find_first_not_of(kBlanks), line.size()));
    line = line.substr(0, line.find_last_not_of(kBlanks) + 1);
    if (line.empty()) continue;
    if (!joined.empty()) joined += " | ";
    joined += line;
  }
  return joined;
}

}  // namespace

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
  is_readable_ = false;
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
  if (is_whole) return in_one_line(words);
  const size_t end = words.find('\n');
  return in_one_line(
      std::string_view(words).substr(end == std::string::npos ? std::min<size_t>(1, words.size()) : end + 1));
}

}  // namespace penstock::server
