// SPDX-License-Identifier: Apache-2.0
#include "base/process_log.h"

#include <unistd.h>

#include <array>
#include <ctime>
#include <utility>

#include "base/environment.h"
#include "base/hex.h"

namespace penstock {
namespace {

// Text that may be from another process, without characters that move a terminal's cursor. Further lines are indented,
// so that none passes for a line of the log.
std::string printable(const std::string& text) {
  std::string shown;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      shown += "\n    ";
    } else if (byte < 0x20 || byte == 0x7f) {
      shown += "\\x";
      append_hex(shown, byte);
    } else {
      shown += c;
    }
  }
  return shown;
}

}  // namespace

ProcessLog::ProcessLog(std::string name) : name_(std::move(name)), host_(host_name()) {}

void ProcessLog::say(const std::string& text) const { write(STDOUT_FILENO, text); }
void ProcessLog::tell(const std::string& text) const { write(STDERR_FILENO, text); }

// Written in one piece, since several processes share a stream. A full disk, or a pipe without a reader, is no reason
// to exit.
void ProcessLog::write(int fd, const std::string& text) const {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::localtime_r(&now, &parts);
  std::array<char, 64> when{};
  std::strftime(when.data(), when.size(), "%Y-%m-%dT%H:%M:%S%z", &parts);
  const std::string line = std::string(when.data()) + " " + name_ + " on " + host_ + ": " + printable(text) + "\n";
  static_cast<void>(::write(fd, line.data(), line.size()) < 0);
}

}  // namespace penstock
