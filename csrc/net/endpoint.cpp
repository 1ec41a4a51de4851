// SPDX-License-Identifier: Apache-2.0
#include "net/endpoint.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "base/process.h"

namespace penstock::net {
namespace {

constexpr std::string_view kScheme = "tcp://";
constexpr size_t kHostLengthMax = 253;  // of a DNS name
constexpr std::string_view kEveryInterface = "*";

Fault bad_endpoint(std::string_view text, const std::string& seen) {
  return {Errc::kMalformed, "the address '" + std::string(text.substr(0, 300)) + "' cannot be used: " + seen +
                                "; write it as tcp://HOST:PORT, such as tcp://127.0.0.1:5555 or tcp://[::1]:5555"};
}

bool is_ipv6_number(const std::string& host) {
  in6_addr address{};
  return ::inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

bool is_name_character(char character) {
  return (character >= 'a' && character <= 'z') || (character >= 'A' && character <= 'Z') ||
         (character >= '0' && character <= '9') || character == '-' || character == '.' || character == '_';
}

std::optional<uint16_t> parse_port(std::string_view text) {
  uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return port;
}

}  // namespace

Result<Endpoint> Endpoint::parse(std::string_view text) {
  if (!text.starts_with(kScheme)) return bad_endpoint(text, "it does not start with tcp://");
  const std::string_view rest = text.substr(kScheme.size());
  const size_t colon = rest.rfind(':');
  if (colon == std::string_view::npos) return bad_endpoint(text, "it has no port");
  const auto port = parse_port(rest.substr(colon + 1));
  if (!port) return bad_endpoint(text, "its port must be a number from 0 to 65535");
  std::string_view host = rest.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
    if (!is_ipv6_number(std::string(host))) return bad_endpoint(text, "the brackets do not contain an IPv6 address");
  } else if (host.find(':') != std::string_view::npos) {
    return bad_endpoint(text, "an IPv6 address must be in brackets");
  } else if (host.empty() || host.size() > kHostLengthMax) {
    return bad_endpoint(text, "its host has " + std::to_string(host.size()) + " characters, but must have 1 to 253");
  } else if (host != kEveryInterface && !std::all_of(host.begin(), host.end(), is_name_character)) {
    return bad_endpoint(text, "its host has characters that are invalid in names and addresses");
  }
  return Endpoint{.host = std::string(host), .port = *port};
}

std::string Endpoint::text() const {
  const bool has_brackets = host.find(':') != std::string::npos;
  return std::string(kScheme) + (has_brackets ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

Result<HostAddress> resolve_bind_address(const Endpoint& endpoint) {
  if (endpoint.host == kEveryInterface) return HostAddress{.number = endpoint.host};
  auto address = look_up(endpoint.host);
  if (address) return address;
  return Fault{Errc::kFailed, "looking up " + endpoint.host + " failed: " + address.error().message +
                                  "; use an address or host name of this machine, or * for all interfaces"};
}

namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

// The addresses of a host, or the system's error number in `error` if there are none.
AddressList addresses_of(const std::string& host, int flags, int& error) {
  addrinfo wanted{};
  wanted.ai_flags = flags;
  wanted.ai_family = AF_UNSPEC;
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  error = ::getaddrinfo(host.c_str(), nullptr, &wanted, &found);
  return {error == 0 ? found : nullptr, &::freeaddrinfo};
}

HostAddress ipv4_address(const sockaddr* address) {
  sockaddr_in value{};
  std::memcpy(&value, address, sizeof value);
  std::array<char, INET_ADDRSTRLEN> text{};
  ::inet_ntop(AF_INET, &value.sin_addr, text.data(), text.size());
  return {.number = text.data(), .is_loopback = ntohl(value.sin_addr.s_addr) >> 24 == 127};
}

HostAddress ipv6_address(const sockaddr* address) {
  sockaddr_in6 value{};
  std::memcpy(&value, address, sizeof value);
  std::array<char, INET6_ADDRSTRLEN> text{};
  ::inet_ntop(AF_INET6, &value.sin6_addr, text.data(), text.size());
  const bool is_mapped_loopback = IN6_IS_ADDR_V4MAPPED(&value.sin6_addr) && value.sin6_addr.s6_addr[12] == 127;
  return {.number = text.data(),
          .is_ipv6 = true,
          .is_loopback = IN6_IS_ADDR_LOOPBACK(&value.sin6_addr) || is_mapped_loopback};
}

const sockaddr* first_of_family(const AddressList& list, int family) {
  for (const addrinfo* each = list.get(); each != nullptr; each = each->ai_next) {
    if (each->ai_family == family) return each->ai_addr;
  }
  return nullptr;
}

// The first IPv4 address, or else the first IPv6 address.
std::optional<HostAddress> first_of(const AddressList& list) {
  if (const sockaddr* address = first_of_family(list, AF_INET); address != nullptr) return ipv4_address(address);
  if (const sockaddr* address = first_of_family(list, AF_INET6); address != nullptr) return ipv6_address(address);
  return std::nullopt;
}

}  // namespace

Result<HostAddress> look_up(const std::string& host) {
  int error = 0;
  if (const auto address = first_of(addresses_of(host, 0, error))) return *address;
  return Fault{Errc::kFailed, error == 0 ? "it has no TCP address" : ::gai_strerror(error)};
}

std::optional<HostAddress> address_of_number(const std::string& host) {
  int error = 0;
  return first_of(addresses_of(host, AI_NUMERICHOST, error));
}

std::string zmq_address(const HostAddress& address, uint16_t port) {
  const std::string host = address.is_ipv6 ? "[" + address.number + "]" : address.number;
  return "tcp://" + host + ":" + (port == 0 ? "*" : std::to_string(port));
}

struct Resolver::State {
  struct Answer {
    std::optional<Result<HostAddress>> address{};  // none before the first lookup
    Instant at{};

    bool is_fresh(Instant now) const { return address && now - at < (*address ? kAddressKept : kFailureKept); }
  };

  State(Lookup function, FileDescriptor descriptor) : lookup(std::move(function)), fd(std::move(descriptor)) {}

  const Lookup lookup;
  const FileDescriptor fd;
  Mutex mutex;
  bool is_closed PENSTOCK_GUARDED_BY(mutex) = false;
  size_t thread_count PENSTOCK_GUARDED_BY(mutex) = 0;
  std::set<std::string> asked PENSTOCK_GUARDED_BY(mutex);            // hosts that wait for an answer
  std::deque<std::string> waiting PENSTOCK_GUARDED_BY(mutex);        // those of them without a thread yet
  std::map<std::string, Answer> answers PENSTOCK_GUARDED_BY(mutex);  // with an entry for each host in `asked`
  std::set<std::string> done PENSTOCK_GUARDED_BY(mutex);

  void make_place(const std::string& host, Instant now) PENSTOCK_REQUIRES(mutex);
  void note(const std::string& host, Result<HostAddress> address) noexcept PENSTOCK_REQUIRES(mutex);
};

namespace {

using SharedState = std::shared_ptr<Resolver::State>;

Result<HostAddress> guarded_lookup(const Resolver::Lookup& lookup, const std::string& host) noexcept {
  Fault failure{.code = Errc::kFailed, .message = {}};
  try {
    try {
      return lookup(host);
    } catch (...) {
      failure.message = current_exception_text();
    }
  } catch (const std::bad_alloc&) {
    failure.message = "no memory";  // short enough to need no allocation
  }
  return Result<HostAddress>(std::move(failure));
}

// Looks up one host after the other until the queue is empty. An exception that left the thread would terminate the
// program, so only the lookup allocates.
void run(const SharedState& state, std::string host) {
  begin_own_thread("pk_lookup");
  for (;;) {
    auto address = guarded_lookup(state->lookup, host);
    const MutexLock lock(state->mutex);
    if (!state->is_closed) state->note(host, std::move(address));
    if (state->is_closed || state->waiting.empty()) {
      --state->thread_count;
      return;
    }
    host = std::move(state->waiting.front());
    state->waiting.pop_front();
  }
}

}  // namespace

// Makes room for the host's answer, so that note() does not allocate. Keeps the entries of hosts that wait for an
// answer.
void Resolver::State::make_place(const std::string& host, Instant now) {
  const bool is_full = answers.size() >= kKnownHostCountMax;
  for (auto at = answers.begin(); is_full && at != answers.end();) {
    const auto answer = at++;
    if (!answer->second.is_fresh(now) && !asked.contains(answer->first)) answers.erase(answer);
  }
  for (auto at = answers.begin(); answers.size() >= kKnownHostCountMax && at != answers.end();) {
    const auto answer = at++;
    if (!asked.contains(answer->first)) answers.erase(answer);
  }
  answers.try_emplace(host);
}

void Resolver::State::note(const std::string& host, Result<HostAddress> address) noexcept {
  Answer& answer = answers.at(host);
  answer.address = std::move(address);
  answer.at = clock_now();
  done.insert(asked.extract(host));
  const uint64_t one = 1;
  static_cast<void>(!::write(fd.get(), &one, sizeof one));
}

Result<std::unique_ptr<Resolver>> Resolver::open(Lookup lookup) {
  FileDescriptor descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!descriptor) {
    return Fault{Errc::kNoMemory, std::string("host names cannot be resolved: no file descriptor is left (") +
                                      std::strerror(errno) + "); raise the limit of open files (ulimit -n)"};
  }
  return std::make_unique<Resolver>(std::make_shared<State>(std::move(lookup), std::move(descriptor)));
}

Resolver::Resolver(std::shared_ptr<State> state) : state_(std::move(state)) {}

Resolver::~Resolver() {
  const MutexLock lock(state_->mutex);
  state_->is_closed = true;
}

std::optional<Result<HostAddress>> Resolver::try_resolve(const std::string& host, Instant now) {
  if (const auto address = address_of_number(host)) return *address;
  const MutexLock lock(state_->mutex);
  if (const auto found = state_->answers.find(host); found != state_->answers.end() && found->second.is_fresh(now))
    return found->second.address;
  if (!state_->asked.insert(host).second) return std::nullopt;
  state_->make_place(host, now);
  if (state_->thread_count >= kLookupCountMax) {
    state_->waiting.push_back(host);
    return std::nullopt;
  }
  try {
    std::thread([state = state_, host]() mutable { run(state, std::move(host)); }).detach();
    ++state_->thread_count;
  } catch (const std::system_error& error) {
    state_->note(host,
                 Fault{Errc::kNoMemory, std::string("no thread could be started to resolve it: ") + error.what()});
  }
  return std::nullopt;
}

int Resolver::fd() const { return state_->fd.get(); }

std::vector<std::string> Resolver::take_done() {
  uint64_t count = 0;
  static_cast<void>(!::read(state_->fd.get(), &count, sizeof count));
  const MutexLock lock(state_->mutex);
  const std::set<std::string> done = std::exchange(state_->done, {});
  return {done.begin(), done.end()};
}

}  // namespace penstock::net
