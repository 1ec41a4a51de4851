// SPDX-License-Identifier: Apache-2.0
#include "base/exit_pipe.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstring>
#include <utility>

namespace penstock {
namespace {

static_assert(kExitLineBytesMax <= PIPE_BUF);

constexpr std::array kExitWords = {ExitWord::kServing, ExitWord::kLeft, ExitWord::kDrained, ExitWord::kUseless,
                                   ExitWord::kFailed};
constexpr size_t kPlaceMax = 1 << 16;  // more workers than any process has
constexpr int kReadCountMax = 32;      // per call, so that a process that floods the pipe does not hold up others

}  // namespace

std::string_view name_of(ExitWord word) {
  switch (word) {
    case ExitWord::kServing: return "serving";
    case ExitWord::kLeft: return "left";
    case ExitWord::kDrained: return "drained";
    case ExitWord::kUseless: return "useless";
    case ExitWord::kFailed: return "failed";
  }
  return "";
}

std::optional<ExitWord> exit_word_named(std::string_view name) {
  for (const ExitWord word : kExitWords)
    if (name_of(word) == name) return word;
  return std::nullopt;
}

void write_exit_line(int fd, ExitWord word, std::string_view text) {
  if (fd < 0) return;
  std::string line(name_of(word));
  if (!text.empty()) line.append(" ").append(text);
  line.resize(std::min(line.size(), kExitLineBytesMax - 1));
  std::replace(line.begin(), line.end(), '\n', ' ');
  line += '\n';
  static_cast<void>(::write(fd, line.data(), line.size()) < 0);
}

ExitListener exit_line_writer(int fd) {
  if (fd < 0) return {};
  return [fd](ExitWord word, std::string_view text) { write_exit_line(fd, word, text); };
}

Result<ExitPipe> ExitPipe::open() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0)
    return Fault{Errc::kNoMemory, std::string("opening a pipe failed: ") + std::strerror(errno)};
  return ExitPipe(FileDescriptor(ends[0]), FileDescriptor(ends[1]));
}

ExitPipe::ExitPipe(FileDescriptor read, FileDescriptor write) : read_(std::move(read)), write_(std::move(write)) {}

bool ExitPipe::read() {
  std::array<char, 4096> bytes{};
  for (int turn = 0; turn < kReadCountMax; ++turn) {
    const ssize_t count = ::read(read_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno == EAGAIN;
    if (count == 0) return false;
    std::string_view left(bytes.data(), static_cast<size_t>(count));
    for (size_t end = left.find('\n'); end != std::string_view::npos; end = left.find('\n')) {
      unfinished_ += left.substr(0, end);
      take(unfinished_);
      unfinished_.clear();
      left.remove_prefix(end + 1);
    }
    unfinished_ += left;
    if (unfinished_.size() >= kExitLineBytesMax) unfinished_.clear();  // not one of our lines
  }
  return true;
}

void ExitPipe::take(std::string_view line) {
  const size_t space = std::min(line.find(' '), line.size());
  const auto word = exit_word_named(line.substr(0, space));
  if (!word) return;
  if (*word == ExitWord::kServing) {
    has_served_ = true;
    return;
  }
  const std::string_view text = line.substr(std::min(space + 1, line.size()));
  if (*word == ExitWord::kLeft) {
    size_t place = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), place);
    if (error == std::errc() && end == text.data() + text.size() && place < kPlaceMax) left_.insert(place);
    return;
  }
  end_ = word;
  text_ = text;
}

}  // namespace penstock
