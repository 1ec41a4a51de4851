// SPDX-License-Identifier: Apache-2.0
#include "base/process.h"

#include <cxxabi.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>

#include "base/bytes.h"
#include "base/result.h"

namespace penstock {

void begin_own_thread(const char* name) {
  ::pthread_setname_np(::pthread_self(), name);
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

std::optional<std::string> environment(const char* variable) {
  const char* value = std::getenv(variable);  // NOLINT(concurrency-mt-unsafe): nothing here sets variables
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> host{};
  ::gethostname(host.data(), HOST_NAME_MAX);
  return host.data();
}

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

DescriptorLimit raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return {};
  DescriptorLimit raised{.before = limit.rlim_cur, .now = limit.rlim_cur};
  limit.rlim_cur = std::max<rlim_t>(limit.rlim_cur, std::min<rlim_t>(limit.rlim_max, kDescriptorLimitMax));
  if (::setrlimit(RLIMIT_NOFILE, &limit) == 0) raised.now = limit.rlim_cur;
  return raised;
}

std::vector<std::string> format_limit(const DescriptorLimit& limit) {
  std::vector<std::string> lines;
  const std::string has = "can have " + std::to_string(limit.now) + " files open";
  if (limit.now != limit.before) lines.push_back(has + "; the previous limit was " + std::to_string(limit.before));
  if (limit.now < kDescriptorLimitMin)
    lines.push_back(has + ", and " + std::to_string(kDescriptorLimitMin) +
                    " or more are recommended for connections and datasets; raise the hard limit (ulimit -Hn, "
                    "LimitNOFILE of a systemd unit)");
  return lines;
}

uint64_t descriptor_limit() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 0;
}

namespace {

constexpr size_t kBlockBytes = 31 << 20;  // below the largest threshold, 32 MiB including glibc's overhead

}  // namespace

void raise_heap_thresholds() {
  void* volatile block = std::malloc(kBlockBytes);  // volatile: otherwise the compiler removes both calls
  std::free(block);
}

std::string current_exception_name() {
  const std::type_info* type = abi::__cxa_current_exception_type();
  if (type == nullptr) return "an exception";
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(abi::__cxa_demangle(type->name(), nullptr, nullptr, &status),
                                                    &std::free);
  return status == 0 ? name.get() : type->name();
}

std::string current_exception_text() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

Result<uint64_t> draw_identity() {
  uint64_t id = 0;
  while (id == 0) {
    if (::getrandom(&id, sizeof id, 0) != static_cast<ssize_t>(sizeof id))
      return Fault{Errc::kFailed, std::string("generating a random id failed: ") + std::strerror(errno)};
  }
  return id;
}

std::string format_id(uint64_t id) {
  std::string text;
  for (int shift = 56; shift >= 0; shift -= 8) append_hex(text, static_cast<uint8_t>(id >> shift));
  return text;
}

std::string make_endpoint_name() {
  std::array<unsigned char, 16> random{};
  const ssize_t filled = ::getrandom(random.data(), random.size(), 0);
  PENSTOCK_ASSERT(filled == static_cast<ssize_t>(random.size()), "getrandom gave ", filled, " bytes");
  std::string name = "penstock-";
  for (const unsigned char byte : random) append_hex(name, byte);
  return name;
}

}  // namespace penstock
