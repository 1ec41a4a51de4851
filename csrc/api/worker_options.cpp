// SPDX-License-Identifier: Apache-2.0
#include "api/worker_options.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/file_descriptor.h"
#include "base/process.h"
#include "net/endpoint.h"

namespace penstock::api {
namespace {

using Mode = WorkerOptions::Mode;

Fault misuse(const std::string& text) { return {Errc::kMalformed, text}; }

Result<int64_t> parse_integer(const std::string& option, const std::string& text, int64_t min, int64_t max) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < min || value > max) {
    return misuse(option + " is '" + text + "', but must be from " + std::to_string(min) + " to " +
                  std::to_string(max) + ", inclusive");
  }
  return value;
}

// This machine's address on the route to a host. Sends no packet.
Result<std::string> address_towards(const net::Endpoint& controller) {
  const auto address = net::look_up(controller.host);
  if (!address) {
    return Fault{address.error().code,
                 "the controller's host " + controller.host + " cannot be resolved (" + address.error().message +
                     "); use a name that this machine can resolve, or set the listening address with --bind"};
  }
  const bool is_ipv6 = address.value().is_ipv6;
  const FileDescriptor socket(::socket(is_ipv6 ? AF_INET6 : AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage towards{};
  socklen_t bytes = is_ipv6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  auto* v4 = reinterpret_cast<sockaddr_in*>(&towards);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&towards);
  const uint16_t port = htons(controller.port != 0 ? controller.port : 1);
  towards.ss_family = is_ipv6 ? AF_INET6 : AF_INET;
  (is_ipv6 ? v6->sin6_port : v4->sin_port) = port;
  ::inet_pton(towards.ss_family, address.value().number.c_str(),
              is_ipv6 ? static_cast<void*>(&v6->sin6_addr) : static_cast<void*>(&v4->sin_addr));
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (!socket || ::connect(socket.get(), reinterpret_cast<sockaddr*>(&towards), bytes) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&towards), &bytes) != 0 ||
      ::inet_ntop(towards.ss_family,
                  is_ipv6 ? static_cast<const void*>(&v6->sin6_addr) : static_cast<const void*>(&v4->sin_addr),
                  text.data(), text.size()) == nullptr) {
    return Fault{Errc::kFailed, "this machine has no route to the controller's host " + controller.host + ": " +
                                    std::strerror(errno) + "; set the listening address with --bind"};
  }
  return std::string(text.data());
}

bool is_any(const std::string& host) { return host == "*" || host == "0.0.0.0" || host == "::"; }

// The n-th of a sequence of addresses with consecutive ports; port 0 stays 0, any free port.
Result<std::string> nth(const std::string& option, const std::string& address, int number) {
  if (address.empty()) return address;
  auto endpoint = net::Endpoint::parse(address);
  if (!endpoint) return misuse(option + ": " + endpoint.error().message);
  net::Endpoint& its = endpoint.value();
  if (its.port != 0 && its.port + number > 65535) {
    return misuse(option + " must leave a port up to 65535 for each process, got port " + std::to_string(its.port) +
                  "; use a lower one, or 0 for free ports");
  }
  if (its.port != 0) its.port = static_cast<uint16_t>(its.port + number);
  return its.text();
}

}  // namespace

std::string worker_usage() {
  return R"(usage: penstock-worker [--controller tcp://HOST:PORT] [--processes N] [OPTION ...]

Runs pool workers on this host. They make batches of plug-in datasets for the trainers that the controller assigns.
Each job runs in a separate process. Python is not required. A worker that ends is restarted unless it was drained. On
SIGTERM or Ctrl-C, the workers finish their batches and leave; a second signal ends them immediately.

  --controller ADDRESS      address of the pool's controller (default: PENSTOCK_POOL)
  --keys DIR                folder with the keys of the pool (default: PENSTOCK_KEYS, else the keys that this user's
                            processes share on this machine)
  --processes N             number of workers to start on this host (default: 1)
  --bind ADDRESS            address at which trainers connect to the first worker; each further worker takes the next
                            port (default: a free port of the interface towards the controller)
  --advertise ADDRESS       address to which trainers connect, if it differs from --bind (default: --bind)
  --data-bind ADDRESS       address of the second port of the first worker, for the bytes of batches (default: a free
                            port of the interface of --bind)
  --data-advertise ADDRESS  address to which trainers connect for it (default: the host of --advertise)
  --patience SECONDS        time after which a worker without trainer and controller ends (default: 60)
  --grace SECONDS           time in which a worker may finish its batch after SIGTERM, Ctrl-C or `penstock drain`;
                            other workers make its unfinished batches (default: 30)
  --version, --help

example:
  penstock-worker --controller tcp://10.0.0.1:7000 --keys keys --processes 4
)";
}

Result<WorkerOptions> parse_worker_options(const std::vector<std::string>& arguments) {
  WorkerOptions options;
  const std::array<std::pair<const char*, std::string WorkerOptions::*>, 7> texts = {
      {{"--controller", &WorkerOptions::controller},
       {"--keys", &WorkerOptions::keys},
       {"--bind", &WorkerOptions::bind},
       {"--advertise", &WorkerOptions::advertise},
       {"--data-bind", &WorkerOptions::data_bind},
       {"--data-advertise", &WorkerOptions::data_advertise},
       {"--handover", &WorkerOptions::handover}}};
  for (size_t index = 0; index < arguments.size(); ++index) {
    std::string option = arguments[index];
    if (option == "--help" || option == "-h") return WorkerOptions{.mode = Mode::kHelp};
    if (option == "--version") return WorkerOptions{.mode = Mode::kVersion};
    if (option == "--own") {
      options.mode = Mode::kOwn;
      continue;
    }
    std::string value;
    if (const size_t equals = option.find('='); equals != std::string::npos) {
      value = option.substr(equals + 1);
      option = option.substr(0, equals);
    } else if (++index < arguments.size()) {
      value = arguments[index];
    } else if (option.starts_with("--")) {
      return misuse(option + " requires a value");
    }
    const auto text = std::find_if(texts.begin(), texts.end(), [&](const auto& one) { return option == one.first; });
    if (text != texts.end()) {
      options.*(text->second) = value;
    } else if (option == "--processes" || option == "--report-fd" || option == "--warm" || option == "--parent") {
      const bool is_count = option == "--processes";
      const auto number = parse_integer(option, value, is_count ? 1 : 0, is_count ? kWorkerProcessesMax : INT32_MAX);
      if (!number) return number.error();
      const auto integer = static_cast<int>(number.value());
      if (is_count) options.processes = integer;
      if (option == "--report-fd") options.report_fd = integer;
      if (option == "--parent") options.parent_pid = integer;
      if (option == "--warm") {
        options.mode = Mode::kWarm;
        options.warm_fd = integer;
      }
    } else if (option == "--patience" || option == "--grace") {
      double& seconds = option == "--patience" ? options.patience_s : options.grace_s;
      char* end = nullptr;
      seconds = std::strtod(value.c_str(), &end);
      if (value.empty() || *end != '\0' || !(seconds >= 1 && seconds <= 1e9))
        return misuse(option + " is '" + value + "', but must be a number of seconds >= 1");
    } else {
      return misuse("there is no option " + option);
    }
  }
  const auto from_environment = [](std::string& value, const char* variable) {
    if (value.empty()) value = environment(variable).value_or("");
  };
  if (options.mode != Mode::kSupervise) return options;
  from_environment(options.controller, "PENSTOCK_POOL");
  from_environment(options.keys, "PENSTOCK_KEYS");
  if (options.controller.empty()) {
    return misuse("the address of the controller is missing; pass --controller tcp://HOST:PORT, or set PENSTOCK_POOL");
  }
  return options;
}

Result<std::vector<WorkerOptions>> options_of_workers(const WorkerOptions& options) {
  WorkerOptions first = options;
  first.processes = 1;
  const auto controller = net::Endpoint::parse(options.controller);
  if (!controller) return misuse("--controller: " + controller.error().message);
  if (first.bind.empty()) {
    auto host = address_towards(controller.value());
    if (!host) return host.error();
    first.bind = net::Endpoint{.host = host.value(), .port = 0}.text();
  }
  const auto bind = net::Endpoint::parse(first.bind);
  if (!bind) return misuse("--bind: " + bind.error().message);
  if (is_any(bind.value().host) && first.advertise.empty()) {
    auto host = address_towards(controller.value());
    if (!host) return host.error();
    first.advertise = net::Endpoint{.host = host.value(), .port = bind.value().port}.text();
  }
  std::vector<WorkerOptions> workers;
  for (int number = 0; number < options.processes; ++number) {
    WorkerOptions one = first;
    for (const auto& [name, member] :
         {std::pair("--bind", &WorkerOptions::bind), std::pair("--advertise", &WorkerOptions::advertise),
          std::pair("--data-bind", &WorkerOptions::data_bind),
          std::pair("--data-advertise", &WorkerOptions::data_advertise)}) {
      auto address = nth(name, first.*member, number);
      if (!address) return address.error();
      one.*member = std::move(address).value();
    }
    workers.push_back(std::move(one));
  }
  return workers;
}

std::vector<std::string> server_arguments(const std::vector<WorkerOptions>& workers, const ServerSettings& settings) {
  std::vector<std::string> arguments;
  const auto add = [&](const char* name, const std::string& value) {
    if (!value.empty()) arguments.push_back(std::string("--") + name + "=" + value);
  };
  for (const WorkerOptions& worker : workers) {
    add("bind", worker.bind);  // starts the options of the next worker
    add("advertised", worker.advertise);
    add("data-bind", worker.data_bind);
    add("data-advertised", worker.data_advertise);
  }
  const WorkerOptions& all = workers.front();
  add("controller", all.controller);
  add("keys", all.keys);
  add("log-name", "penstock-worker");
  add("arena-bytes", std::to_string(settings.arena_bytes));
  add("blob-bytes", std::to_string(settings.blob_bytes));
  add("patience", std::to_string(all.patience_s));
  add("grace", std::to_string(all.grace_s));
  add("parent", std::to_string(::getpid()));
  add("exit-fd", std::to_string(settings.exit_fd));
  arguments.emplace_back("--");
  arguments.insert(arguments.end(), settings.warm_command.begin(), settings.warm_command.end());
  return arguments;
}

}  // namespace penstock::api
