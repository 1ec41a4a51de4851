// SPDX-License-Identifier: Apache-2.0
#include "loader/thread_source.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace penstock::loader {
namespace {

// Nothing can be said of the sample that it fails at.
class SpeechlessMaker final : public ThreadMaker {
 public:
  std::string in_hand() const override { throw std::runtime_error("the sample is not known"); }
  Made make(const session::RequestContent&, const wire::EpochSeeds&) override {
    throw std::runtime_error("the dataset fails");
  }
};

// The program was ended by std::terminate: only what the dataset itself throws was caught.
TEST(ThreadSource, ThreadThatThrowsIsAFailureThatNamesIt) {
  std::vector<std::unique_ptr<ThreadMaker>> makers;
  makers.push_back(std::make_unique<SpeechlessMaker>());
  ThreadSource source({}, std::move(makers), /*has_threads=*/true);
  ASSERT_TRUE(source.start({}));
  source.fetch(std::make_shared<session::RequestContent>());
  ASSERT_TRUE(source.inbox().wait_until(std::chrono::steady_clock::now() + std::chrono::seconds(30)));
  const auto arrival = source.inbox().try_pop();
  ASSERT_TRUE(arrival);
  ASSERT_EQ(arrival->kind, Arrival::Kind::kFailed);
  EXPECT_EQ(arrival->error->message, "the thread pk_data_worker, which makes batches, failed: the sample is not known");
}

}  // namespace
}  // namespace penstock::loader
