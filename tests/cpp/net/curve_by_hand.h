// SPDX-License-Identifier: Apache-2.0
#pragma once
// A client that speaks ZMTP 3.0 with CURVE by hand (RFC 23 and 26), so that it can send messages that libzmq never
// sends.

#include <gtest/gtest.h>
#include <sodium.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "net/keys.h"
#include "tcp_connection.h"

namespace penstock::test {

using Bytes = std::vector<std::byte>;

inline Bytes bytes_of(std::string_view text) {
  const auto view = std::as_bytes(std::span(text));
  return {view.begin(), view.end()};
}

inline void append(Bytes& bytes, std::span<const std::byte> more) {
  bytes.insert(bytes.end(), more.begin(), more.end());
}

inline Bytes big_endian(uint64_t value, size_t size) {
  Bytes bytes(size);
  for (size_t place = size; place-- > 0; value >>= 8) bytes[place] = static_cast<std::byte>(value & 0xff);
  return bytes;
}

// The greeting of a client of a mechanism such as "CURVE" or "NULL".
inline Bytes greeting(std::string_view mechanism) {
  Bytes bytes(64);
  bytes[0] = std::byte{0xff};
  bytes[9] = std::byte{0x7f};
  bytes[10] = std::byte{3};
  std::memcpy(bytes.data() + 12, mechanism.data(), mechanism.size());
  return bytes;
}

enum FrameFlags : uint8_t { kMore = 1, kLong = 2, kCommand = 4 };

// The head of a frame with a length of eight bytes.
inline Bytes long_head(uint8_t flags, uint64_t length) {
  Bytes bytes = {static_cast<std::byte>(flags | kLong)};
  append(bytes, big_endian(length, 8));
  return bytes;
}

// Confined to one thread.
class CurveByHand {
 public:
  using Metadata = std::vector<std::pair<std::string, std::string>>;

  CurveByHand(uint16_t port, const net::KeyPair& own, const net::PublicKey& server_key,
              uint32_t source = INADDR_LOOPBACK)
      : connection_(port, source), own_(own), server_key_(server_key) {
    EXPECT_GE(sodium_init(), 0);
    crypto_box_keypair(place(short_public_.data()), place(short_secret_.data()));
  }

  // Shakes hands, with `metadata` besides the socket's type. Returns whether the server let this client in.
  bool try_shake_hands(const Metadata& metadata = {}) {
    if (!connection_.try_send(greeting("CURVE")) || connection_.receive(64).size() != 64) return false;
    if (!connection_.try_send(frame(kCommand, hello()))) return false;
    const Bytes welcome = receive_frame();
    if (welcome.size() != 168) return false;
    Bytes nonce = bytes_of("WELCOME-");
    append(nonce, std::span(welcome).subspan(8, 16));
    const Bytes opened = open(std::span(welcome).subspan(24), nonce, server_key_.bytes(), short_secret_);
    if (opened.size() != 128) return false;
    std::memcpy(server_short_.data(), opened.data(), 32);
    if (!connection_.try_send(frame(kCommand, initiate(std::span(opened).subspan(32), metadata)))) return false;
    const Bytes ready = receive_frame();
    return ready.size() > 6 && std::memcmp(ready.data(), "\5READY", 6) == 0;
  }

  // One part of a message, encrypted and authentic.
  Bytes part(std::span<const std::byte> payload, bool is_more) {
    Bytes plain = {static_cast<std::byte>(is_more ? 1 : 0)};
    append(plain, payload);
    Bytes body = bytes_of("\7MESSAGE");
    append(body, sealed("CurveZMQMESSAGEC", plain, server_short_, short_secret_));
    return frame(0, body);
  }

  TcpConnection& connection() { return connection_; }

 private:
  using Key = std::array<std::byte, 32>;

  static unsigned char* place(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }
  static const unsigned char* place(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }

  static Bytes frame(uint8_t flags, std::span<const std::byte> body) {
    Bytes bytes = long_head(flags, body.size());
    if (body.size() < 256) bytes = {static_cast<std::byte>(flags), static_cast<std::byte>(body.size())};
    append(bytes, body);
    return bytes;
  }

  Bytes receive_frame() {
    const Bytes head = connection_.receive(2);
    if (head.size() != 2 || (head[0] & std::byte{kLong}) != std::byte{0}) return {};
    return connection_.receive(static_cast<size_t>(head[1]));
  }

  static Bytes box(std::span<const std::byte> plain, std::span<const std::byte> nonce, std::span<const std::byte> to,
                   std::span<const std::byte> from) {
    Bytes boxed(plain.size() + crypto_box_MACBYTES);
    EXPECT_EQ(crypto_box_easy(place(boxed.data()), place(plain.data()), plain.size(), place(nonce.data()),
                              place(to.data()), place(from.data())),
              0);
    return boxed;
  }
  static Bytes open(std::span<const std::byte> boxed, std::span<const std::byte> nonce, std::span<const std::byte> from,
                    std::span<const std::byte> to) {
    Bytes plain(boxed.size() - crypto_box_MACBYTES);
    if (crypto_box_open_easy(place(plain.data()), place(boxed.data()), boxed.size(), place(nonce.data()),
                             place(from.data()), place(to.data())) != 0) {
      return {};
    }
    return plain;
  }

  // The eight bytes of the next short nonce and the box.
  Bytes sealed(std::string_view nonce_head, std::span<const std::byte> plain, std::span<const std::byte> to,
               std::span<const std::byte> from) {
    Bytes bytes = big_endian(++nonce_, 8);
    Bytes nonce = bytes_of(nonce_head);
    append(nonce, bytes);
    append(bytes, box(plain, nonce, to, from));
    return bytes;
  }

  Bytes hello() {
    Bytes body = bytes_of("\5HELLO");
    append(body, Bytes{std::byte{1}, std::byte{0}});
    append(body, Bytes(72));
    append(body, short_public_);
    append(body, sealed("CurveZMQHELLO---", Bytes(64), server_key_.bytes(), short_secret_));
    return body;
  }

  Bytes initiate(std::span<const std::byte> cookie, const Metadata& metadata) {
    Bytes vouched(short_public_.begin(), short_public_.end());
    append(vouched, server_key_.bytes());
    Bytes vouch_nonce(16);
    randombytes_buf(vouch_nonce.data(), vouch_nonce.size());
    Bytes nonce = bytes_of("VOUCH---");
    append(nonce, vouch_nonce);
    Bytes plain(own_.public_key().bytes().begin(), own_.public_key().bytes().end());
    append(plain, vouch_nonce);
    append(plain, box(vouched, nonce, server_short_, own_.secret_key().bytes()));
    append(plain, property("Socket-Type", "DEALER"));
    for (const auto& [name, value] : metadata) append(plain, property(name, value));
    Bytes body = bytes_of("\10INITIATE");
    append(body, cookie);
    append(body, sealed("CurveZMQINITIATE", plain, server_short_, short_secret_));
    return body;
  }

  static Bytes property(std::string_view name, std::string_view value) {
    Bytes bytes = big_endian(name.size(), 1);
    append(bytes, bytes_of(name));
    append(bytes, big_endian(value.size(), 4));
    append(bytes, bytes_of(value));
    return bytes;
  }

  TcpConnection connection_;
  const net::KeyPair& own_;
  const net::PublicKey server_key_;
  Key short_public_{};
  Key short_secret_{};
  Key server_short_{};
  uint64_t nonce_ = 0;
};

}  // namespace penstock::test
