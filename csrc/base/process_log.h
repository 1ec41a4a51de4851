// SPDX-License-Identifier: Apache-2.0
#pragma once
// The log lines of a worker process, in the format of `penstock worker`: time, process, event.

#include <string>
#include <utility>

namespace penstock {

// Confined to the main thread.
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

}  // namespace penstock
