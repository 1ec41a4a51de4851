// SPDX-License-Identifier: Apache-2.0
#include "wire/shipment.h"

#include <gtest/gtest.h>

#include <random>

namespace penstock::wire {
namespace {

std::string key(char letter) { return std::string(32, letter); }

const Shipment kSample{
    .boundary_keys = {{key('a'), key('b')}, {key('c')}}, .withheld = {0, 3, 70'000 % 65'536}, .whole_every = 1000};

TEST(ShipmentTest, IsReadAsItWasWritten) {
  for (const Shipment& shipment : {kSample, Shipment{}, Shipment{.boundary_keys = {{key('x')}}, .withheld = {}}}) {
    const auto bytes = write_shipment(shipment);
    EXPECT_TRUE(is_shipment(bytes));
    const auto parsed = parse_shipment(bytes);
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(parsed.value(), shipment);
  }
}

TEST(ShipmentTest, EveryTruncationIsRefused) {
  const auto bytes = write_shipment(kSample);
  for (size_t size = 0; size < bytes.size(); ++size) EXPECT_FALSE(parse_shipment(std::span(bytes).first(size))) << size;
  auto longer = bytes;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(parse_shipment(longer));
}

TEST(ShipmentTest, DamageIsRefusedOrReadAsAnotherOne) {
  std::mt19937 random(7);
  const auto sample = write_shipment(kSample);
  for (int round = 0; round < 20'000; ++round) {
    auto bytes = sample;
    for (unsigned change = 0; change <= random() % 3; ++change)
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    const auto parsed = parse_shipment(bytes);
    if (parsed) {
      EXPECT_EQ(write_shipment(parsed.value()), bytes);
    }
  }
}

TEST(ShipmentTest, IsToldFromAPrefix) {
  EXPECT_FALSE(is_shipment({}));
  const std::vector<std::byte> prefix(64, std::byte{1});
  EXPECT_FALSE(is_shipment(prefix));
}

}  // namespace
}  // namespace penstock::wire
