// SPDX-License-Identifier: Apache-2.0
#include "api/own_processes.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstring>
#include <utility>

#include "api/library_folder.h"
#include "base/environment.h"
#include "base/file_descriptor.h"
#include "base/identity.h"
#include "net/shared_key_folder.h"

namespace penstock::api {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr auto kStartMax = std::chrono::seconds(300);  // Python processes may import torch one after the other
constexpr auto kEndMax = std::chrono::seconds(5);

// PENSTOCK_WORKER overrides the installed program.
std::string native_program() {
  if (std::string given = environment("PENSTOCK_WORKER").value_or(""); !given.empty()) return given;
  return program_beside_library("penstock-worker");
}

std::vector<std::string> command_of(OwnProcesses::Kind kind, const std::string& handover, int report_fd) {
  const std::vector<std::string> arguments = {
      "--handover", handover, "--report-fd", std::to_string(report_fd), "--parent", std::to_string(::getpid())};
  std::vector<std::string> command;
  if (kind == OwnProcesses::Kind::kNative) {
    command = {native_program(), "--own"};
  } else {
    const std::string python = environment("PENSTOCK_PYTHON").value_or("");
    command = {python.empty() ? "python3" : python, "-m", "penstock.pool.own_process"};
  }
  command.insert(command.end(), arguments.begin(), arguments.end());
  return command;
}

Fault not_listening(OwnProcesses::Kind kind, int64_t count, ChildProcess& process, const std::string& program) {
  const bool has_ended = process.wait_until(steady_clock::now() + milliseconds(500));
  std::string text = "a local DataLoader worker (num_workers=" + std::to_string(count) + ", " + program +
                     ") has not opened its port and " + (has_ended ? process.poll()->spoken() : "is still starting") +
                     "; check its output on stderr";
  if (kind == OwnProcesses::Kind::kPython)
    text += "; it requires a Python with penstock: PENSTOCK_PYTHON, or python3 on PATH";
  return {Errc::kFailed, std::move(text)};
}

}  // namespace

Result<OwnProcesses> OwnProcesses::start(Kind kind, int64_t count) {
  // Created before the workers start: a worker that is killed while creating it could leave it incomplete.
  if (auto folder = net::shared_key_folder(); !folder) return folder.error();
  OwnProcesses own;
  std::vector<FileDescriptor> pipes;
  std::vector<std::string> handovers;
  std::string program;
  for (int64_t index = 0; index < count; ++index) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
      return Fault{Errc::kNoMemory, std::string("starting worker processes failed: ") + std::strerror(errno) +
                                        "; raise the limit of open files (ulimit -n)"};
    }
    pipes.emplace_back(ends[0]);
    const FileDescriptor report(ends[1]);
    handovers.push_back(make_endpoint_name());
    const auto command = command_of(kind, handovers.back(), report.get());
    program = command[0];
    auto started = ChildProcess::start({.command = command, .passed_fd = report.get()});
    if (!started) {
      const char* remedy =
          kind == Kind::kPython
              ? "; its dataset is a Python object: install a Python with penstock on this machine and set "
                "PENSTOCK_PYTHON to it, or use only a pool (num_workers=0)"
              : "; set PENSTOCK_WORKER to the program penstock-worker, which is installed next to the library";
      return Fault{Errc::kUnsupported, started.error().message + remedy};
    }
    own.processes_.push_back(std::move(started).value());
  }
  const auto deadline = steady_clock::now() + kStartMax;
  for (size_t index = 0; index < own.processes_.size(); ++index) {
    // "ID ENDPOINT", sent once the worker listens.
    const auto read = read_line_until(pipes[index].get(), deadline);
    const std::string line = read ? read.value() : std::string();
    const size_t space = line.find(' ');
    uint64_t id = 0;
    std::from_chars(line.data(), line.data() + line.size(), id);
    auto endpoint = space != std::string::npos ? net::Endpoint::parse(line.substr(space + 1))
                                               : Result<net::Endpoint>(Fault{Errc::kMalformed, ""});
    if (!endpoint || id == 0) return not_listening(kind, count, own.processes_[index], program);
    own.workers_.push_back({.worker_id = id, .endpoint = std::move(endpoint).value(), .handover = handovers[index]});
  }
  return own;
}

OwnProcesses::~OwnProcesses() {
  for (ChildProcess& process : processes_) process.signal(SIGTERM);
  const auto deadline = steady_clock::now() + kEndMax;
  for (ChildProcess& process : processes_) static_cast<void>(process.wait_until(deadline));
}

std::vector<OwnProcesses::Loss> OwnProcesses::take_losses() {
  std::vector<Loss> losses;
  for (size_t index = 0; index < processes_.size(); ++index) {
    if (lost_.contains(index)) continue;
    const auto& end = processes_[index].poll();
    if (!end) continue;
    lost_.insert(index);
    losses.push_back({.worker_id = workers_[index].worker_id, .pid = processes_[index].pid(), .how = end->spoken()});
  }
  return losses;
}

}  // namespace penstock::api
