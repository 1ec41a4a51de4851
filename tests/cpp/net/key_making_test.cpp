// SPDX-License-Identifier: Apache-2.0
// The rotation of a folder's keys, whole and interrupted. What else is made is tested with what is read
// (key_folder_test.cpp).
#include "net/key_making.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../base/child_process.h"
#include "../base/temp_folder.h"
#include "base/file_descriptor.h"
#include "net/key_folder.h"

namespace penstock::net {
namespace {

using test::file_mode;
using test::file_text;
using test::names_in;
using test::write_file;

class KeyRotation : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(make_key_folder(folder_));
    ASSERT_TRUE(make_user_keys(folder_, "ann", temp_ / "of-ann"));
    ASSERT_TRUE(make_machine_keys(folder_, "beta", temp_ / "of-beta"));
    before_ = public_keys(folder_);
  }

  std::string file(const std::string& name) const { return folder_ + "/" + name; }

  static PublicKeys public_keys(const std::string& folder) {
    const auto keys = load_key_folder(folder, Role::kOperator);
    EXPECT_TRUE(keys) << keys.error().message;
    return keys ? keys.value().public_keys() : PublicKeys();
  }
  // Every role finds a key of its own that is let in, and so are those who began before the rotation.
  void expect_usable(const std::string& folder) const {
    const PublicKeys now = public_keys(folder);
    for (const Role role : kRoles) {
      SCOPED_TRACE(role_name(role));
      const auto keys = load_key_folder(folder, role);
      ASSERT_TRUE(keys) << keys.error().message;
      EXPECT_TRUE(now.admits(keys.value().own().public_key(), role));
      EXPECT_TRUE(now.admits(before_.roles[static_cast<size_t>(role)], role));
    }
    EXPECT_EQ(now.users, before_.users);
    EXPECT_EQ(now.machines, before_.machines);
  }
  static void expect_refused_with(const Result<void>& result, const std::string& words) {
    ASSERT_FALSE(result);
    EXPECT_NE(result.error().message.find(words), std::string::npos) << result.error().message;
  }
  static std::set<std::string> former_files() {
    std::set<std::string> names;
    for (const Role role : kRoles) names.insert(std::string(role_name(role)) + ".former.public");
    return names;
  }

  const test::TempFolder temp_;
  const std::string folder_ = temp_ / "keys";
  PublicKeys before_;
};

TEST_F(KeyRotation, MakesNewPairsAndKeepsThePublicKeysOfBeforeUntilItIsFinished) {
  const auto names_before = names_in(folder_);
  const auto rotated = rotate_keys(folder_);
  ASSERT_TRUE(rotated) << rotated.error().message;
  expect_usable(folder_);
  const PublicKeys now = public_keys(folder_);
  for (const Role role : kRoles) {
    const auto place = static_cast<size_t>(role);
    EXPECT_NE(now.roles[place], before_.roles[place]);
    EXPECT_EQ(now.former[place], before_.roles[place]);
    EXPECT_EQ(now.generations(role), (std::vector<PublicKey>{now.roles[place], before_.roles[place]}));
    EXPECT_EQ(load_key_folder(folder_, role).value().own().public_key(), now.roles[place]);
  }
  auto with_former = names_before;
  with_former.merge(former_files());
  EXPECT_EQ(names_in(folder_), with_former);
  for (const std::string& name : names_in(folder_)) EXPECT_EQ(file_mode(file(name)), 0600u) << name;

  const auto finished = finish_rotation(folder_);
  ASSERT_TRUE(finished) << finished.error().message;
  EXPECT_EQ(names_in(folder_), names_before);
  const PublicKeys after = public_keys(folder_);
  EXPECT_EQ(after.roles, now.roles);
  EXPECT_EQ(after.users, before_.users);
  for (const Role role : kRoles)
    EXPECT_FALSE(after.admits(before_.roles[static_cast<size_t>(role)], role)) << role_name(role);
}

TEST_F(KeyRotation, SecondOneIsRefusedUntilTheFirstIsFinished) {
  ASSERT_TRUE(rotate_keys(folder_));
  const PublicKeys now = public_keys(folder_);
  expect_refused_with(rotate_keys(folder_), "run penstock keys " + folder_ + " --finish");
  EXPECT_EQ(public_keys(folder_), now);
  ASSERT_TRUE(finish_rotation(folder_));
  expect_refused_with(finish_rotation(folder_), "there is no rotation to finish");
  EXPECT_TRUE(rotate_keys(folder_));
}

TEST_F(KeyRotation, EndThatWasInterruptedIsCompletedAndNotTakenForABeginning) {
  ASSERT_TRUE(rotate_keys(folder_));
  ASSERT_EQ(::unlink(file("trainer.former.public").c_str()), 0);
  expect_refused_with(rotate_keys(folder_), "--finish");
  ASSERT_TRUE(finish_rotation(folder_));
  EXPECT_EQ(public_keys(folder_).former, FormerKeys());
}

TEST_F(KeyRotation, NeedsTheSecretsOfAllRolesAndChangesNothingWithoutThem) {
  const auto names = names_in(temp_ / "of-beta");
  expect_refused_with(rotate_keys(temp_ / "of-beta"), "it has no controller.secret");
  EXPECT_EQ(names_in(temp_ / "of-beta"), names);
  write_file(file("worker.secret"), file_text(temp_ / "of-beta/worker.secret"));
  expect_refused_with(rotate_keys(folder_), "worker.secret does not belong to worker.public");
  EXPECT_EQ(public_keys(folder_), before_);
}

TEST_F(KeyRotation, WithoutRoomForTheNewKeysNothingIsChanged) {
  const auto names = names_in(folder_);
  EXPECT_EQ(test::in_child([&]() -> std::string {
              test::limit_file_size(0);
              return rotate_keys(folder_) ? "keys were made without room for them" : "";
            }),
            "");
  EXPECT_EQ(names_in(folder_), names);
  EXPECT_EQ(public_keys(folder_), before_);
}

TEST_F(KeyRotation, TwoAtOnceAreRefused) {
  const FileDescriptor fd(::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ASSERT_EQ(::flock(fd.get(), LOCK_EX), 0);
  expect_refused_with(rotate_keys(folder_), "another penstock keys process is changing them");
  expect_refused_with(finish_rotation(folder_), "another penstock keys process is changing them");
}

// A host is given the files one after the other.
TEST_F(KeyRotation, HostWhoseFilesAreCopiedInTheirOrderIsUsableAllTheWhile) {
  const std::string host = temp_ / "host";
  std::filesystem::copy(folder_, host);
  for (const char* secret : {"controller.secret", "trainer.secret", "operator.secret"})
    ASSERT_EQ(::unlink((host + "/" + secret).c_str()), 0);
  ASSERT_TRUE(rotate_keys(folder_));
  std::vector<std::string> in_order;
  for (const std::string& name : former_files()) in_order.push_back(name);
  for (const Role role : kRoles) in_order.push_back(std::string(role_name(role)) + ".public");
  in_order.emplace_back("worker.secret");
  for (const std::string& name : in_order) {
    SCOPED_TRACE(name);
    expect_refused_with(finish_rotation(host), "");  // it is too early
    std::filesystem::copy_file(file(name), host + "/" + name, std::filesystem::copy_options::overwrite_existing);
    const auto keys = load_key_folder(host, Role::kWorker);
    ASSERT_TRUE(keys) << keys.error().message;
    // Old and new workers and trainers know each other, as soon as there are new ones.
    for (const Role role : kRoles)
      EXPECT_TRUE(keys.value().public_keys().admits(before_.roles[static_cast<size_t>(role)], role));
    EXPECT_TRUE(public_keys(folder_).admits(keys.value().own().public_key(), Role::kWorker));
  }
  ASSERT_TRUE(finish_rotation(host));
  EXPECT_EQ(load_key_folder(host, Role::kWorker).value().own().public_key(),
            public_keys(folder_).roles[static_cast<size_t>(Role::kWorker)]);
}

TEST_F(KeyRotation, UserMadeInTheMiddleOfItKnowsBothGenerationsOfServers) {
  ASSERT_TRUE(rotate_keys(folder_));
  ASSERT_TRUE(make_user_keys(folder_, "ben", temp_ / "of-ben"));
  const auto ben = load_key_folder(temp_ / "of-ben", Role::kTrainer);
  ASSERT_TRUE(ben) << ben.error().message;
  for (const Role role : {Role::kController, Role::kWorker})
    EXPECT_EQ(ben.value().public_keys().generations(role), public_keys(folder_).generations(role));
}

// Runs `body` in a child that is killed where it begins to rename a file for the `count`th time. Returns whether it
// came so far; nothing where no child may be traced.
std::optional<bool> kill_at_rename(int count, const std::function<std::string()>& body) {
  test::ChildProcess child([&]() -> std::string {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(99);
    ::raise(SIGSTOP);
    return body();
  });
  const auto next_status = [&] {
    int status = 0;
    while (::waitpid(child.pid(), &status, 0) < 0 && errno == EINTR) {
    }
    return status;
  };
  const auto end_with = [&](std::optional<bool> result) {
    ::kill(child.pid(), SIGKILL);
    next_status();
    return result;
  };
  constexpr long kOptions = PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL;
  if (!WIFSTOPPED(next_status())) return std::nullopt;
  if (::ptrace(PTRACE_SETOPTIONS, child.pid(), nullptr, kOptions) != 0) return end_with(std::nullopt);
  for (long signal = 0;;) {
    if (::ptrace(PTRACE_SYSCALL, child.pid(), nullptr, signal) != 0) return end_with(std::nullopt);
    const int status = next_status();
    if (!WIFSTOPPED(status)) return false;  // it has ended by itself
    signal = WSTOPSIG(status);
    if (signal != (SIGTRAP | 0x80)) continue;  // which is how a system call stops it
    signal = 0;
    __ptrace_syscall_info info{};
    if (::ptrace(PTRACE_GET_SYSCALL_INFO, child.pid(), sizeof info, &info) <= 0) return end_with(std::nullopt);
    if (info.op != PTRACE_SYSCALL_INFO_ENTRY) continue;
    bool is_rename = info.entry.nr == SYS_renameat2;
#ifdef SYS_renameat
    is_rename = is_rename || info.entry.nr == SYS_renameat;
#endif
    if (is_rename && --count == 0) return end_with(true);
  }
}

TEST_F(KeyRotation, ThatIsKilledAtAnyStepLeavesAUsableFolderAndIsCompletedByTheNext) {
  int count = 1;
  for (;; ++count) {
    SCOPED_TRACE("before rename " + std::to_string(count));
    const std::string folder = temp_ / ("at-" + std::to_string(count));
    std::filesystem::copy(folder_, folder);
    const auto is_killed = kill_at_rename(count, [&]() -> std::string {
      const auto rotated = rotate_keys(folder);
      return rotated ? "" : rotated.error().message;
    });
    if (!is_killed) GTEST_SKIP() << "this system lets no child be traced";
    expect_usable(folder);
    if (*is_killed) {
      EXPECT_FALSE(finish_rotation(folder)) << "some keys of before are still needed";
      const auto completed = rotate_keys(folder);
      ASSERT_TRUE(completed) << completed.error().message;
      expect_usable(folder);
    }
    const PublicKeys now = public_keys(folder);
    for (const Role role : kRoles) {
      const auto place = static_cast<size_t>(role);
      EXPECT_EQ(now.former[place], before_.roles[place]);
      EXPECT_EQ(load_key_folder(folder, role).value().own().public_key(), now.roles[place]);
    }
    auto names = names_in(folder_);
    names.merge(former_files());
    EXPECT_EQ(names_in(folder), names) << "something was left aside";
    ASSERT_TRUE(finish_rotation(folder));
    if (!*is_killed) break;
  }
  EXPECT_EQ(count, 13) << "three files for each role";
}

}  // namespace
}  // namespace penstock::net
