// SPDX-License-Identifier: Apache-2.0
#include "net/shared_key_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "../base/child_process.h"
#include "../base/temp_folder.h"
#include "net/key_folder.h"
#include "net/key_making.h"

namespace penstock::net {
namespace {

using test::file_mode;
using test::names_in;

class SharedKeyFolder : public testing::Test {
 protected:
  SharedKeyPlaces temporary() const { return {.runtime_folder = "", .temp_folder = temp_.path()}; }
  SharedKeyPlaces runtime() const { return {.runtime_folder = temp_.path(), .temp_folder = "/nowhere"}; }
  std::string own_name() const { return "penstock-" + std::to_string(::geteuid()); }
  std::string own_folder() const { return temp_ / own_name(); }

  void expect_refused(const std::string& word) const {
    const auto folder = shared_key_folder(temporary());
    ASSERT_FALSE(folder);
    EXPECT_EQ(folder.error().code, Errc::kMismatch);
    EXPECT_NE(folder.error().message.find(word), std::string::npos) << folder.error().message;
  }

  const test::TempFolder temp_;
};

TEST_F(SharedKeyFolder, IsMadeOnFirstUseAndKeptFromThenOn) {
  const auto first = load_shared_keys(Role::kWorker, temporary());
  ASSERT_TRUE(first) << first.error().message;
  EXPECT_EQ(first.value().origin(), KeyOrigin::kShared);
  EXPECT_EQ(file_mode(own_folder()), 0700u);
  const auto second = load_shared_keys(Role::kTrainer, temporary());
  ASSERT_TRUE(second) << second.error().message;
  EXPECT_EQ(second.value().controller_key(), first.value().controller_key());
  EXPECT_EQ(names_in(temp_.path()), std::set<std::string>{own_name()});
}

TEST_F(SharedKeyFolder, LiesInTheRuntimeFolderIfThereIsOne) {
  EXPECT_EQ(shared_key_folder(runtime()).value(), temp_ / "penstock");
  EXPECT_EQ(names_in(temp_.path()), std::set<std::string>{"penstock"});
}

TEST_F(SharedKeyFolder, IsLookedForWhereTheEnvironmentSays) {
  EXPECT_EQ(test::in_child([&]() -> std::string {
              ::setenv("XDG_RUNTIME_DIR", temp_.path().c_str(), 1);
              if (shared_key_folder().value() != temp_ / "penstock") return "not in XDG_RUNTIME_DIR";
              ::setenv("XDG_RUNTIME_DIR", "relative", 1);
              ::setenv("TMPDIR", temp_.path().c_str(), 1);
              if (shared_key_folder().value() != own_folder()) return "not in TMPDIR";
              ::unsetenv("XDG_RUNTIME_DIR");
              ::unsetenv("TMPDIR");
              if (SharedKeyPlaces::from_environment().temp_folder != "/tmp") return "not in /tmp";
              return "";
            }),
            "");
}

TEST_F(SharedKeyFolder, ManyProcessesThatMakeItAtOnceUseTheSameKeys) {
  constexpr int kProcessCount = 12;
  std::vector<std::unique_ptr<test::Gate>> gates;
  std::vector<std::unique_ptr<test::ChildProcess>> children;
  for (int index = 0; index < kProcessCount; ++index) {
    gates.push_back(std::make_unique<test::Gate>());
    children.push_back(std::make_unique<test::ChildProcess>([&gate = *gates.back(), this]() -> std::string {
      gate.pass();
      const auto keys = load_shared_keys(Role::kTrainer, temporary());
      return keys ? keys.value().controller_key().text() : keys.error().message;
    }));
  }
  for (const auto& gate : gates) gate->open();
  std::set<std::string> answers;
  for (const auto& child : children) answers.insert(child->join());
  const auto keys = load_shared_keys(Role::kOperator, temporary());
  ASSERT_TRUE(keys) << keys.error().message;
  EXPECT_EQ(answers, std::set<std::string>{keys.value().controller_key().text()});
  EXPECT_EQ(names_in(temp_.path()), std::set<std::string>{own_name()});
}

TEST_F(SharedKeyFolder, WithALooserModeIsRefused) {
  ASSERT_TRUE(shared_key_folder(temporary()));
  ASSERT_EQ(::chmod(own_folder().c_str(), 0701), 0);
  expect_refused("other users can access it");
}

TEST_F(SharedKeyFolder, BehindASymbolicLinkIsRefused) {
  ASSERT_TRUE(make_key_folder(temp_ / "elsewhere"));
  ASSERT_EQ(::symlink((temp_ / "elsewhere").c_str(), own_folder().c_str()), 0);
  expect_refused("not a folder");
}

TEST_F(SharedKeyFolder, OfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a folder away";
  ASSERT_TRUE(shared_key_folder(temporary()));
  ASSERT_EQ(::chown(own_folder().c_str(), 65534, 65534), 0);
  expect_refused("another user");
}

TEST_F(SharedKeyFolder, InAPlaceThatIsNotThereIsAnError) {
  const auto folder = shared_key_folder({.runtime_folder = temp_ / "none", .temp_folder = ""});
  ASSERT_FALSE(folder);
  EXPECT_NE(folder.error().message.find("penstock keys"), std::string::npos) << folder.error().message;
}

}  // namespace
}  // namespace penstock::net
