// SPDX-License-Identifier: Apache-2.0
#include "server/server_program.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace penstock::server {
namespace {

using Arguments = std::vector<const char*>;
using Words = std::vector<std::string>;

// The orders with so many arguments beside those that must be there.
Result<ServerOrders> orders_with(Arguments arguments) {
  arguments.insert(arguments.begin(), "--bind=tcp://127.0.0.1:0");
  arguments.insert(arguments.end(), {"--", "python3", "-m", "warm"});
  return parse_server_orders(arguments);
}

TEST(ServerOrders, AreAtTheirDefaultsButForWhatMustBeSaid) {
  const auto parsed = orders_with({});
  ASSERT_TRUE(parsed) << parsed.error().message;
  const ServerOrders& orders = parsed.value();
  ASSERT_EQ(orders.workers.size(), 1u);
  const ServerAddresses& addresses = orders.workers.front();
  EXPECT_EQ(addresses.bind, "tcp://127.0.0.1:0");
  EXPECT_EQ(addresses.controller, std::nullopt);
  EXPECT_EQ(addresses.advertised, std::nullopt);
  EXPECT_EQ(addresses.data_bind, std::nullopt);
  EXPECT_EQ(addresses.data_advertised, std::nullopt);
  EXPECT_EQ(addresses.key_folder, std::nullopt);
  EXPECT_EQ(orders.name, "");
  EXPECT_EQ(orders.powercap, "");
  EXPECT_EQ(orders.arena_bytes, 0u);
  EXPECT_EQ(orders.blob_bytes_max, 0u);
  EXPECT_EQ(orders.patience_s, 60);
  EXPECT_EQ(orders.grace_s, 30);
  EXPECT_EQ(orders.parent_pid, 0);
  EXPECT_EQ(orders.exit_fd, -1);
  EXPECT_FALSE(orders.is_quiet);
  EXPECT_EQ(orders.warm_command, (Words{"python3", "-m", "warm"}));
}

TEST(ServerOrders, AreReadFromEachOption) {
  const auto parsed = orders_with({"--controller=tcp://controller:7000", "--advertised=tcp://worker:7001",
                                   "--data-bind=tcp://0.0.0.0:7002", "--data-advertised=tcp://worker:7003",
                                   "--keys=/a folder", "--name=job=5", "--powercap=/sys/class/powercap",
                                   "--arena-bytes=18446744073709551615", "--blob-bytes=274877906944", "--patience=1.5",
                                   "--grace=0", "--parent=4321", "--exit-fd=9", "--quiet=1"});
  ASSERT_TRUE(parsed) << parsed.error().message;
  const ServerOrders& orders = parsed.value();
  ASSERT_EQ(orders.workers.size(), 1u);
  const ServerAddresses& addresses = orders.workers.front();
  EXPECT_EQ(addresses.controller, "tcp://controller:7000");
  EXPECT_EQ(addresses.advertised, "tcp://worker:7001");
  EXPECT_EQ(addresses.data_bind, "tcp://0.0.0.0:7002");
  EXPECT_EQ(addresses.data_advertised, "tcp://worker:7003");
  EXPECT_EQ(addresses.key_folder, "/a folder");
  EXPECT_EQ(orders.name, "job=5") << "its value may have an equals sign";
  EXPECT_EQ(orders.powercap, "/sys/class/powercap");
  EXPECT_EQ(orders.arena_bytes, ~uint64_t{0});
  EXPECT_EQ(orders.blob_bytes_max, uint64_t{1} << 38);
  EXPECT_EQ(orders.patience_s, 1.5);
  EXPECT_EQ(orders.grace_s, 0);
  EXPECT_EQ(orders.parent_pid, 4321);
  EXPECT_EQ(orders.exit_fd, 9);
  EXPECT_TRUE(orders.is_quiet);
}

TEST(ServerOrders, EachBindBeginsAWorkerToWhichTheAddressesBehindItBelong) {
  const auto parsed = parse_server_orders(Arguments{"--keys=/keys", "--bind=tcp://a:1", "--data-bind=tcp://a:2",
                                                    "--bind=tcp://a:3", "--quiet=1", "--bind=tcp://a:4",
                                                    "--advertised=tcp://b:4", "--controller=tcp://c:5", "--", "warm"});
  ASSERT_TRUE(parsed) << parsed.error().message;
  const auto& workers = parsed.value().workers;
  ASSERT_EQ(workers.size(), 3u);
  EXPECT_EQ(workers[0].bind, "tcp://a:1");
  EXPECT_EQ(workers[0].data_bind, "tcp://a:2");
  EXPECT_EQ(workers[0].advertised, std::nullopt);
  EXPECT_EQ(workers[1].bind, "tcp://a:3");
  EXPECT_EQ(workers[1].data_bind, std::nullopt);
  EXPECT_EQ(workers[2].bind, "tcp://a:4");
  EXPECT_EQ(workers[2].advertised, "tcp://b:4");
  for (const ServerAddresses& addresses : workers) {
    EXPECT_EQ(addresses.key_folder, "/keys") << "wherever it stands";
    EXPECT_EQ(addresses.controller, "tcp://c:5");
  }
  EXPECT_TRUE(parsed.value().is_quiet);
}

TEST(ServerOrders, AddressesOfNoWorkerAreRefused) {
  for (const char* const argument :
       {"--advertised=tcp://a:1", "--data-bind=tcp://a:1", "--data-advertised=tcp://a:1"}) {
    const auto parsed = parse_server_orders(Arguments{argument, "--bind=tcp://a:2", "--", "warm"});
    ASSERT_FALSE(parsed) << argument;
    EXPECT_EQ(parsed.error().code, Errc::kMalformed);
    EXPECT_NE(parsed.error().message.find("\"" + std::string(argument) + "\""), std::string::npos);
  }
}

TEST(ServerOrders, AllBehindTwoDashesIsTheCommand) {
  const auto parsed = parse_server_orders(Arguments{"--bind=tcp://a:1", "--", "warm", "--bind=tcp://b:2", "--", "x"});
  ASSERT_TRUE(parsed) << parsed.error().message;
  ASSERT_EQ(parsed.value().workers.size(), 1u);
  EXPECT_EQ(parsed.value().workers.front().bind, "tcp://a:1");
  EXPECT_EQ(parsed.value().warm_command, (Words{"warm", "--bind=tcp://b:2", "--", "x"}));
}

TEST(ServerOrders, LoudnessIsSaidByZeroOrOne) {
  EXPECT_FALSE(orders_with({"--quiet=0"}).value().is_quiet);
  EXPECT_TRUE(orders_with({"--quiet=1"}).value().is_quiet);
}

TEST(ServerOrders, LogHasTheNameOfTheProgramThatStartsIt) {
  EXPECT_EQ(orders_with({}).value().log_name, "penstock worker");
  EXPECT_EQ(orders_with({"--log-name=penstock-worker"}).value().log_name, "penstock-worker");
}

TEST(ServerOrders, WhatIsNotUnderstoodIsNamed) {
  for (const char* const argument : {"--unknown=1",
                                     "bind=tcp://a:1",
                                     "-bind=tcp://a:1",
                                     "--bind",
                                     "--quiet",
                                     "--=1",
                                     "",
                                     "word",
                                     "--arena-bytes=",
                                     "--arena-bytes=-1",
                                     "--arena-bytes=1.5",
                                     "--arena-bytes=0x10",
                                     "--arena-bytes=1 ",
                                     "--arena-bytes= 1",
                                     "--arena-bytes=18446744073709551616",
                                     "--blob-bytes=1k",
                                     "--patience=",
                                     "--patience=long",
                                     "--patience=1s",
                                     "--grace=1,5",
                                     "--parent=me",
                                     "--parent=99999999999",
                                     "--exit-fd=1.0",
                                     "--quiet=",
                                     "--quiet=2",
                                     "--quiet=true"}) {
    const auto parsed = orders_with({argument});
    ASSERT_FALSE(parsed) << argument;
    EXPECT_EQ(parsed.error().code, Errc::kMalformed);
    EXPECT_NE(parsed.error().message.find("\"" + std::string(argument) + "\""), std::string::npos)
        << parsed.error().message;
  }
}

TEST(ServerOrders, WithoutAnAddressOrACommandAreRefused) {
  for (const Arguments& arguments : {Arguments{}, Arguments{"--bind=tcp://a:1"}, Arguments{"--bind=tcp://a:1", "--"},
                                     Arguments{"--", "warm"}, Arguments{"--bind=", "--", "warm"}}) {
    const auto parsed = parse_server_orders(arguments);
    ASSERT_FALSE(parsed);
    EXPECT_EQ(parsed.error().code, Errc::kMalformed);
    EXPECT_NE(parsed.error().message.find("penstock worker"), std::string::npos) << parsed.error().message;
  }
}

}  // namespace
}  // namespace penstock::server
