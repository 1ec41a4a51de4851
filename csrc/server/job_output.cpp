// SPDX-License-Identifier: Apache-2.0
#include "server/job_output.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string_view>

namespace penstock::server {
namespace {

// Drops empty lines, and the blanks around each line.
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

size_t OutputBudget::take(size_t bytes, Instant now) {
  const double seconds = filled_at_ ? std::chrono::duration<double>(now - *filled_at_).count() : 0.0;
  left_ = std::min(left_ + std::max(0.0, seconds) * double{kOutputBytesPerSecond}, double{kOutputBurstBytes});
  filled_at_ = now;
  const size_t taken = std::min(bytes, static_cast<size_t>(left_));
  left_ -= static_cast<double>(taken);
  return taken;
}

Result<JobOutput::Ends> JobOutput::open() {
  std::array<int, 2> fds{};
  if (::pipe2(fds.data(), O_CLOEXEC) != 0)
    return Fault{Errc::kNoMemory, std::string("opening a pipe for a job failed: ") + std::strerror(errno)};
  FileDescriptor here(fds[0]);
  FileDescriptor there(fds[1]);
  // Only for this end: writers at the other end block, as at any pipe.
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
  if (tail_.size() > kTailBytesMax) tail_.erase(0, tail_.size() - kTailBytesMax);
  return text;
}

std::string JobOutput::last_output(std::string_view log_name) const {
  const std::string mark = " " + std::string(log_name) + " on ";
  std::string words;
  for (std::string_view left = tail_; !left.empty();) {
    const size_t end = left.find('\n');
    const std::string_view line = left.substr(0, end == std::string_view::npos ? end : end + 1);
    left.remove_prefix(line.size());
    if (line.find(mark) == std::string_view::npos) words += line;
  }
  while (!words.empty() && (words.back() == '\n' || words.back() == ' ')) words.pop_back();
  if (words.size() <= kLastOutputBytesMax) return in_one_line(words);
  // One more byte, to detect whether the first line is complete.
  words.erase(0, words.size() - kLastOutputBytesMax - 1);
  const size_t end = words.find('\n');
  return in_one_line(std::string_view(words).substr(end == std::string::npos ? 1 : end + 1));
}

}  // namespace penstock::server
