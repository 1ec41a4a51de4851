// SPDX-License-Identifier: Apache-2.0
#include "net/key_folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <initializer_list>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../base/child_process.h"
#include "../base/temp_folder.h"
#include "net/key_making.h"

namespace penstock::net {
namespace {

using test::file_mode;
using test::file_text;
using test::names_in;
using test::write_file;

class KeyFolder : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(make_key_folder(folder_));
    secret_ = file_text(file("trainer.secret")).substr(0, kKeyTextLength);
  }

  std::string file(const std::string& name) const { return folder_ + "/" + name; }

  // The error of loading the folder for a trainer: its code, and that each of `words` is in its sentence.
  void expect_refused(Errc code, std::initializer_list<std::string> words) const {
    const auto loaded = load_key_folder(folder_, Role::kTrainer);
    ASSERT_FALSE(loaded);
    EXPECT_EQ(loaded.error().code, code) << loaded.error().message;
    for (const auto& word : words) {
      EXPECT_NE(loaded.error().message.find(word), std::string::npos) << word << ": " << loaded.error().message;
    }
    EXPECT_EQ(loaded.error().message.find(secret_), std::string::npos) << "the secret is in the message";
  }

  static std::string secret_of(Role role) { return std::string(role_name(role)) + ".secret"; }

  const test::TempFolder temp_;
  const std::string folder_ = temp_ / "keys";
  std::string secret_;
};

TEST_F(KeyFolder, EveryRoleHasAPairThatOnlyItsOwnerCanRead) {
  EXPECT_EQ(file_mode(folder_), 0700u);
  EXPECT_EQ(names_in(folder_).size(), 2 * kRoles.size());
  for (const Role role : kRoles) {
    for (const auto* kind : {".public", ".secret"}) {
      const std::string path = file(std::string(role_name(role)) + kind);
      EXPECT_EQ(file_mode(path), 0600u) << path;
      EXPECT_EQ(file_text(path).size(), kKeyTextLength + 1) << path;
    }
  }
}

TEST_F(KeyFolder, EveryRoleFindsItsOwnPairAndTheOthersPublicKeys) {
  for (const Role role : kRoles) {
    const auto keys = load_key_folder(folder_, role);
    ASSERT_TRUE(keys) << keys.error().message;
    EXPECT_EQ(keys.value().own_role(), role);
    EXPECT_EQ(keys.value().origin(), KeyOrigin::kGiven);
    EXPECT_EQ(keys.value().own().public_key(), keys.value().public_key(role));
    EXPECT_EQ(keys.value().controller_key().text() + "\n", file_text(file("controller.public")));
    EXPECT_TRUE(keys.value().users().empty());
  }
}

TEST_F(KeyFolder, UsersHaveTrainersKeysOfTheirOwn) {
  const std::string anns = temp_ / "of-ann", bens = temp_ / "of-ben";
  ASSERT_TRUE(make_user_keys(folder_, "ann", anns));
  ASSERT_TRUE(make_user_keys(folder_, "ben.2", bens));
  const auto ann = load_key_folder(anns, Role::kTrainer);
  ASSERT_TRUE(ann) << ann.error().message;
  EXPECT_TRUE(ann.value().users().empty());
  EXPECT_EQ(file_mode(anns), 0700u);
  EXPECT_EQ(file_mode(anns + "/trainer.secret"), 0600u);
  EXPECT_EQ(names_in(anns).size(), kRoles.size() + 1) << "the secrets of other roles are not ann's";
  const auto ben = load_key_folder(bens, Role::kTrainer);
  ASSERT_TRUE(ben) << ben.error().message;
  const auto pool = load_key_folder(folder_, Role::kController);
  ASSERT_TRUE(pool) << pool.error().message;
  EXPECT_EQ(pool.value().users(),
            (KeyNames{{ann.value().own().public_key(), "ann"}, {ben.value().own().public_key(), "ben.2"}}));
  EXPECT_EQ(ann.value().controller_key(), pool.value().controller_key());
}

TEST_F(KeyFolder, UserThatIsThereOrHasNoNameIsRefusedAndNothingIsChanged) {
  ASSERT_TRUE(make_user_keys(folder_, "ann", temp_ / "of-ann"));
  const auto before = names_in(folder_);
  const auto again = make_user_keys(folder_, "ann", temp_ / "again");
  ASSERT_FALSE(again);
  EXPECT_NE(again.error().message.find("ann.user.public already exists"), std::string::npos) << again.error().message;
  EXPECT_FALSE(std::filesystem::exists(temp_ / "again"));
  EXPECT_FALSE(make_user_keys(folder_, "ben", temp_ / "of-ann")) << "somebody's folder";
  for (const auto* name : {"", ".ann", "a/b", "a b", "\xc3\xa4nn"})
    EXPECT_FALSE(make_user_keys(folder_, name, temp_ / "other")) << name;
  EXPECT_EQ(names_in(folder_), before);
}

TEST_F(KeyFolder, MachinesHaveWorkersKeysOfTheirOwn) {
  ASSERT_TRUE(make_user_keys(folder_, "ann", temp_ / "of-ann"));
  const std::string betas = temp_ / "of-beta";
  const auto made = make_machine_keys(folder_, "beta", betas);
  ASSERT_TRUE(made) << made.error().message;
  EXPECT_EQ(file_mode(betas), 0700u);
  EXPECT_EQ(file_mode(betas + "/worker.secret"), 0600u);
  EXPECT_EQ(names_in(betas),
            (std::set<std::string>{"controller.public", "trainer.public", "worker.public", "operator.public",
                                   "ann.user.public", "beta.machine.public", "worker.secret"}));
  const auto beta = load_key_folder(betas, Role::kWorker);
  ASSERT_TRUE(beta) << beta.error().message;
  const auto pool = load_key_folder(folder_, Role::kController);
  ASSERT_TRUE(pool) << pool.error().message;
  const PublicKey& key = beta.value().own().public_key();
  EXPECT_NE(key, pool.value().public_key(Role::kWorker));
  EXPECT_EQ(beta.value().public_keys(), pool.value().public_keys());
  EXPECT_EQ(pool.value().public_keys().machines, (KeyNames{{key, "beta"}}));
  for (const Role role : kRoles) EXPECT_EQ(pool.value().public_keys().admits(key, role), role == Role::kWorker);
  EXPECT_FALSE(make_machine_keys(folder_, "beta", temp_ / "again"));
  EXPECT_FALSE(std::filesystem::exists(temp_ / "again"));
  EXPECT_FALSE(make_machine_keys(folder_, "../beta", temp_ / "again"));
}

// All hosts may be given all public keys.
TEST_F(KeyFolder, MachinesFolderTakesThePublicKeysOfThePool) {
  ASSERT_TRUE(make_machine_keys(folder_, "beta", temp_ / "of-beta"));
  ASSERT_TRUE(make_machine_keys(folder_, "gamma", temp_ / "of-gamma"));
  for (const std::string& name : names_in(folder_))
    if (name.ends_with(".public"))
      std::filesystem::copy_file(file(name), temp_ / ("of-beta/" + name),
                                 std::filesystem::copy_options::overwrite_existing);
  const auto beta = load_key_folder(temp_ / "of-beta", Role::kWorker);
  ASSERT_TRUE(beta) << beta.error().message;
  EXPECT_EQ(beta.value().public_keys().machines.at(beta.value().own().public_key()), "beta");
  ASSERT_EQ(::unlink((temp_ / "of-beta/beta.machine.public").c_str()), 0);
  const auto removed = load_key_folder(temp_ / "of-beta", Role::kWorker);
  ASSERT_FALSE(removed);
  EXPECT_NE(removed.error().message.find("worker.secret does not belong to worker.public"), std::string::npos);
}

TEST_F(KeyFolder, MachineWithTheKeyOfAUserIsRefused) {
  ASSERT_TRUE(make_user_keys(folder_, "ann", temp_ / "of-ann"));
  write_file(file("ann.machine.public"), file_text(file("ann.user.public")));
  ASSERT_EQ(::chmod(file("ann.machine.public").c_str(), 0600), 0);
  expect_refused(Errc::kMismatch, {"the machine ann has the key of a role, or of another user or machine"});
}

TEST_F(KeyFolder, UserWithTheKeyOfARoleIsRefused) {
  write_file(file("eve.user.public"), file_text(file("operator.public")));
  ASSERT_EQ(::chmod(file("eve.user.public").c_str(), 0600), 0);
  expect_refused(Errc::kMismatch, {"the user eve has the key of a role"});
}

TEST_F(KeyFolder, UsersKeyThatOthersCouldHaveWrittenIsRefused) {
  ASSERT_TRUE(make_user_keys(folder_, "ann", temp_ / "of-ann"));
  ASSERT_EQ(::chmod(file("ann.user.public").c_str(), 0622), 0);
  expect_refused(Errc::kMismatch, {"ann.user.public", "0622"});
}

TEST_F(KeyFolder, AHostNeedsNoSecretButItsOwn) {
  for (const auto* name : {"controller.secret", "worker.secret", "operator.secret"}) ::unlink(file(name).c_str());
  EXPECT_TRUE(load_key_folder(folder_, Role::kTrainer));
  const auto worker = load_key_folder(folder_, Role::kWorker);
  ASSERT_FALSE(worker);
  EXPECT_NE(worker.error().message.find("worker.secret"), std::string::npos) << worker.error().message;
}

TEST_F(KeyFolder, AKeyWithoutItsNewlineIsRead) {
  const std::string text = file_text(file("trainer.secret"));
  write_file(file("trainer.secret"), text.substr(0, kKeyTextLength));
  EXPECT_TRUE(load_key_folder(folder_, Role::kTrainer));
}

TEST_F(KeyFolder, KeysThatAreThereAreNeverOverwritten) {
  const std::string before = file_text(file("worker.secret"));
  const auto again = make_key_folder(folder_);
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code, Errc::kMismatch);
  EXPECT_EQ(file_text(file("worker.secret")), before);

  const std::string other = temp_ / "other";
  ASSERT_EQ(::mkdir(other.c_str(), 0700), 0);
  ASSERT_EQ(::symlink("/nowhere", (other + "/operator.public").c_str()), 0);
  EXPECT_FALSE(make_key_folder(other));
  EXPECT_EQ(names_in(other), std::set<std::string>{"operator.public"});
}

TEST_F(KeyFolder, WhatFailedLeavesNothingBehind) {
  const std::string other = temp_ / "other";
  EXPECT_EQ(test::in_child([&]() -> std::string {
              test::limit_file_size(0);
              return make_key_folder(other) ? "keys were made without room for them" : "";
            }),
            "");
  EXPECT_FALSE(std::filesystem::exists(other));
  EXPECT_FALSE(make_key_folder(temp_ / "no/such/folder"));
}

TEST_F(KeyFolder, AFolderThatIsNotThereIsSaidToBeMissing) {
  const auto loaded = load_key_folder(temp_ / "none", Role::kTrainer);
  ASSERT_FALSE(loaded);
  EXPECT_NE(loaded.error().message.find("penstock keys"), std::string::npos) << loaded.error().message;
}

TEST_F(KeyFolder, AFileInThePlaceOfTheFolderIsRefused) {
  EXPECT_FALSE(load_key_folder(file("trainer.public"), Role::kTrainer));
}

// The bits of the mode that let others in, each alone.
class LooseMode : public KeyFolder, public testing::WithParamInterface<mode_t> {};

TEST_P(LooseMode, OfTheFolderIsRefused) {
  ASSERT_EQ(::chmod(folder_.c_str(), 0700 | GetParam()), 0);
  expect_refused(Errc::kMismatch, {"mode", "chmod"});
}

TEST_P(LooseMode, OfASecretIsRefused) {
  ASSERT_EQ(::chmod(file("trainer.secret").c_str(), 0600 | GetParam()), 0);
  expect_refused(Errc::kMismatch, {"trainer.secret", "mode", "chmod"});
}

TEST_P(LooseMode, OfAPublicKeyIsRefused) {
  ASSERT_EQ(::chmod(file("worker.public").c_str(), 0600 | GetParam()), 0);
  expect_refused(Errc::kMismatch, {"worker.public", "mode"});
}

TEST_P(LooseMode, OfAFolderThatKeysAreToBeMadeInIsRefused) {
  const std::string other = temp_ / "other";
  ASSERT_EQ(::mkdir(other.c_str(), 0700), 0);
  ASSERT_EQ(::chmod(other.c_str(), 0700 | GetParam()), 0);
  EXPECT_EQ(make_key_folder(other).error().code, Errc::kMismatch);
  EXPECT_TRUE(names_in(other).empty());
}

INSTANTIATE_TEST_SUITE_P(KeyFolder, LooseMode, testing::Values(0040, 0020, 0010, 0004, 0002, 0001));

TEST_F(KeyFolder, OfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  ASSERT_EQ(::chown(file("trainer.secret").c_str(), 65534, 65534), 0);
  expect_refused(Errc::kMismatch, {"trainer.secret", "65534"});
  ASSERT_EQ(::chown(file("trainer.secret").c_str(), 0, 0), 0);
  ASSERT_EQ(::chown(folder_.c_str(), 65534, 65534), 0);
  expect_refused(Errc::kMismatch, {"65534"});
}

TEST_F(KeyFolder, ASymbolicLinkToAKeyIsRefused) {
  for (const auto* name : {"trainer.secret", "worker.public"}) {
    ASSERT_EQ(::rename(file(name).c_str(), file("elsewhere").c_str()), 0);
    ASSERT_EQ(::symlink("elsewhere", file(name).c_str()), 0);
    expect_refused(Errc::kMismatch, {name, "symbolic link"});
    ASSERT_EQ(::rename(file("elsewhere").c_str(), file(name).c_str()), 0);
  }
  EXPECT_TRUE(load_key_folder(folder_, Role::kTrainer));
}

TEST_F(KeyFolder, WhatIsNoFileIsRefusedWithoutWaiting) {
  ::unlink(file("trainer.secret").c_str());
  ASSERT_EQ(::mkfifo(file("trainer.secret").c_str(), 0600), 0);
  expect_refused(Errc::kMismatch, {"trainer.secret", "regular file"});
}

TEST_F(KeyFolder, EveryOtherLengthIsRefused) {
  const std::string text = file_text(file("trainer.secret"));
  for (size_t length = 0; length < kKeyTextLength; ++length) {
    write_file(file("trainer.secret"), text.substr(0, length));
    expect_refused(Errc::kMalformed, {"trainer.secret", std::to_string(length) + " bytes"});
  }
  write_file(file("trainer.secret"), text + "\n");
  expect_refused(Errc::kMalformed, {"trainer.secret"});
  write_file(file("trainer.secret"), text.substr(0, kKeyTextLength) + "x");
  expect_refused(Errc::kMalformed, {"trainer.secret"});
  write_file(file("trainer.secret"), text + std::string(1'000'000, '0'));
  expect_refused(Errc::kMalformed, {"trainer.secret"});
}

TEST_F(KeyFolder, TextThatIsNoZ85IsRefused) {
  for (const auto* name : {"trainer.secret", "operator.public"}) {
    const std::string before = file_text(file(name));
    std::string text = before;
    text[17] = '~';
    write_file(file(name), text);
    expect_refused(Errc::kMalformed, {name, "Z85"});
    write_file(file(name), std::string(kKeyTextLength, '#') + "\n");  // digits that are too large
    expect_refused(Errc::kMalformed, {name, "Z85"});
    write_file(file(name), before);
  }
}

TEST_F(KeyFolder, ASecretThatBelongsToAnotherPublicKeyIsRefused) {
  write_file(file("trainer.secret"), file_text(file("worker.secret")));
  expect_refused(Errc::kMismatch, {"trainer.secret", "does not belong"});
}

TEST_F(KeyFolder, TwoRolesWithOneKeyAreRefused) {
  write_file(file("operator.public"), file_text(file("worker.public")));
  expect_refused(Errc::kMismatch, {"worker", "operator", "same key"});
}

// `penstock status` with a trainer's keys said "make keys with penstock keys".
TEST_F(KeyFolder, KeysOfAnotherRoleAreNamedAsSuch) {
  for (const Role role : kRoles)
    if (role != Role::kWorker) std::filesystem::remove(file(std::string(role_name(role)) + ".secret"));
  expect_refused(Errc::kMismatch,
                 {"the folder contains the keys of a worker, but this process needs the keys of a trainer",
                  "pass a folder with trainer.secret"});
  std::filesystem::remove(file("worker.secret"));
  expect_refused(Errc::kFailed, {"trainer.secret", "create keys with penstock keys"});
}

// A worker's folder had all of them, as `penstock keys` makes them, and a dataset asked for the pool's status.
TEST_F(KeyFolder, SecretsThatAWorkerNeedsNotAreWarnedOf) {
  const std::string warning = warning_of_workers_keys(folder_);
  for (const char* words : {"controller.secret, trainer.secret, operator.secret in addition to worker.secret",
                            "with only worker.secret and the .public files"})
    EXPECT_NE(warning.find(words), std::string::npos) << warning;
  EXPECT_NE(warning.find(folder_), std::string::npos) << warning;
  for (const Role role : {Role::kController, Role::kTrainer}) ASSERT_EQ(::unlink(file(secret_of(role)).c_str()), 0);
  EXPECT_NE(warning_of_workers_keys(folder_).find(" contains operator.secret in addition"), std::string::npos);
  ASSERT_EQ(::unlink(file(secret_of(Role::kOperator)).c_str()), 0);
  EXPECT_EQ(warning_of_workers_keys(folder_), "");
  EXPECT_EQ(warning_of_workers_keys(temp_ / "no folder"), "");
}

TEST_F(KeyFolder, AMissingPublicKeyIsNamed) {
  ::unlink(file("controller.public").c_str());
  expect_refused(Errc::kFailed, {"controller.public"});
}

class WatchedKeyFolder : public KeyFolder {
 protected:
  void SetUp() override {
    KeyFolder::SetUp();
    const auto keys = load_key_folder(folder_, Role::kWorker);
    ASSERT_TRUE(keys) << keys.error().message;
    ASSERT_EQ(keys.value().folder(), folder_);
    watch_.emplace(keys.value().folder(), Role::kWorker, keys.value().public_keys());
    expect_no_change();
  }

  void expect_no_change() {
    const auto change = watch_->look();
    ASSERT_TRUE(change) << change.error().message;
    EXPECT_FALSE(change.value()) << change.value()->notice;
  }
  // The notice of a change that there must be.
  std::string change() {
    auto change = watch_->look();
    EXPECT_TRUE(change) << change.error().message;
    if (!change || !change.value()) return "nothing has changed";
    keys_ = std::move(change.value()->keys);
    return change.value()->notice;
  }

  std::optional<KeyFolderWatch> watch_;
  PublicKeys keys_;
};

TEST_F(WatchedKeyFolder, KeysThatComeAndGoAreSeenOnce) {
  ASSERT_TRUE(make_user_keys(folder_, "ann", temp_ / "of-ann"));
  ASSERT_TRUE(make_user_keys(folder_, "ben", temp_ / "of-ben"));
  const std::string added = change();
  EXPECT_TRUE(added.ends_with("; now accepted: the keys of ann, ben") ||
              added.ends_with("; now accepted: the keys of ben, ann"))
      << added;
  EXPECT_EQ(keys_.users.size(), 2u);
  expect_no_change();
  ASSERT_EQ(::unlink(file("ann.user.public").c_str()), 0);
  EXPECT_EQ(change(), "has read the keys in " + folder_ + " again; no longer accepted: the keys of ann");
  ASSERT_EQ(keys_.users.size(), 1u);
  EXPECT_EQ(keys_.users.begin()->second, "ben");
  expect_no_change();
  write_file(file("trainer.public"), KeyPair::generate().public_key().text() + "\n");
  EXPECT_EQ(change(), "has read the keys in " + folder_ + " again; changed keys: trainer");
  EXPECT_EQ(keys_.roles[static_cast<size_t>(Role::kTrainer)].text() + "\n", file_text(file("trainer.public")));
  write_file(file("worker.public"), KeyPair::generate().public_key().text() + "\n");
  EXPECT_TRUE(change().ends_with("which takes effect when the process is restarted"));
}

TEST_F(WatchedKeyFolder, MachinesAndGenerationsThatComeAndGoAreTold) {
  const std::string again = "has read the keys in " + folder_ + " again";
  ASSERT_TRUE(make_machine_keys(folder_, "beta", temp_ / "of-beta"));
  EXPECT_EQ(change(), again + "; now accepted: the keys of the machine beta");
  EXPECT_EQ(keys_.machines.size(), 1u);
  ASSERT_EQ(::unlink(file("beta.machine.public").c_str()), 0);
  EXPECT_EQ(change(), again + "; no longer accepted: the keys of the machine beta");
  ASSERT_TRUE(rotate_keys(folder_));
  const std::string rotated = change();
  EXPECT_NE(rotated.find("; changed keys: controller, trainer, operator; the former keys are also accepted for: "
                         "controller, trainer, operator; the key of this process has changed"),
            std::string::npos)
      << rotated;
  expect_no_change();
  ASSERT_TRUE(finish_rotation(folder_));
  EXPECT_EQ(change(), again + "; the former keys are no longer accepted for: controller, trainer, operator");
  EXPECT_EQ(keys_.former, FormerKeys());
}

TEST_F(WatchedKeyFolder, FolderThatCannotBeUsedLeavesWhatIsKnownAndIsReadOnceItCan) {
  ASSERT_TRUE(make_user_keys(folder_, "ann", temp_ / "of-ann"));
  ASSERT_EQ(::chmod(folder_.c_str(), 0755), 0);
  for (int look = 0; look < 2; ++look) {
    const auto refused = watch_->look();
    ASSERT_FALSE(refused);
    EXPECT_NE(refused.error().message.find("0755"), std::string::npos) << refused.error().message;
  }
  ASSERT_EQ(::chmod(folder_.c_str(), 0700), 0);
  write_file(file("ben.user.public"), "no key");
  ASSERT_EQ(::chmod(file("ben.user.public").c_str(), 0600), 0);
  for (int look = 0; look < 2; ++look) EXPECT_FALSE(watch_->look()) << "it is an error for as long as it lasts";
  ASSERT_EQ(::unlink(file("ben.user.public").c_str()), 0);
  change();
  EXPECT_EQ(keys_.users.size(), 1u);
}

TEST_F(KeyFolder, FolderIsFoundAgainFromAnotherWorkingFolder) {
  const auto keys = load_key_folder(std::filesystem::relative(folder_), Role::kTrainer);
  ASSERT_TRUE(keys) << keys.error().message;
  EXPECT_TRUE(keys.value().folder().starts_with('/')) << keys.value().folder();
  EXPECT_TRUE(load_key_folder(keys.value().folder(), Role::kTrainer));
}

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
