// SPDX-License-Identifier: Apache-2.0
#include "base/descriptor_limit.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <string>

#include "child_process.h"

namespace penstock {
namespace {

std::string limits_after(rlim_t soft, rlim_t hard) {
  return test::in_child([&]() -> std::string {
    const rlimit given{.rlim_cur = soft, .rlim_max = hard};
    if (::setrlimit(RLIMIT_NOFILE, &given) != 0) return "the limit could not be set";
    const DescriptorLimit raised = raise_descriptor_limit();
    rlimit found{};
    ::getrlimit(RLIMIT_NOFILE, &found);
    return std::to_string(raised.before) + " to " + std::to_string(raised.now) + ", found " +
           std::to_string(descriptor_limit()) + " of " + std::to_string(found.rlim_max);
  });
}

// A stranger who opened 1,100 connections to a worker's port made the dataset's next open() fail.
TEST(DescriptorLimit, IsRaisedToTheHardOne) {
  EXPECT_EQ(limits_after(200, 400), "200 to 400, found 400 of 400");
  EXPECT_EQ(limits_after(400, 400), "400 to 400, found 400 of 400");
}

}  // namespace
}  // namespace penstock
