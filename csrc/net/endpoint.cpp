// SPDX-License-Identifier: Apache-2.0
#include "net/endpoint.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <optional>

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

}  // namespace penstock::net
