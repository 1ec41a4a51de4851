// SPDX-License-Identifier: Apache-2.0
#include "base/job_separation.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <functional>
#include <set>
#include <string>

#include "base/file_descriptor.h"
#include "child_process.h"
#include "temp_folder.h"

namespace penstock {
namespace {

using Hiding = JobSeparation::Hiding;
using NoNetwork = JobSeparation::NoNetwork;

constexpr uid_t kNobody = 65534;

// Why opening it fails, or "" where it does not.
std::string opening(const std::string& path, int flags = O_RDONLY) {
  const FileDescriptor file(::open(path.c_str(), flags | O_CLOEXEC, 0600));
  return file ? "" : ::strerrorname_np(errno);
}

std::string connecting(int family) {
  const FileDescriptor socket(::socket(family, SOCK_STREAM, 0));
  if (!socket) return ::strerrorname_np(errno);
  const sockaddr_in to{.sin_family = AF_INET, .sin_port = htons(9), .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero{}};
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0) return "";
  return ::strerrorname_np(errno);
}

// What `body` finds in a process that is separated so.
std::string separated(const JobSeparation& separation, const std::function<std::string()>& body) {
  return test::in_child([&]() -> std::string {
    if (const auto done = separate_job(separation); !done) return done.error().message;
    return body();
  });
}

// A folder of keys beside a job's data, below a folder of the test.
class JobSeparationTest : public testing::Test {
 protected:
  void SetUp() override {
    ::chmod(folder_.path().c_str(), 0755);
    for (const char* const name : {"keys", "data", "own"}) ::mkdir((folder_ / name).c_str(), 0777);
    ::chmod((folder_ / "own").c_str(), 0777);
    test::write_file(folder_ / "keys/worker.secret", "secret");
    test::write_file(folder_ / "data/rows", "rows");
  }

  JobSeparation hiding(Hiding how) const { return {.hiding = how, .hidden = {folder_ / "keys"}}; }

  void expect_keys_are_hidden(const JobSeparation& separation) {
    if (const auto tried = try_separation(separation); !tried) GTEST_SKIP() << tried.error().message;
    const std::string found = separated(separation, [&]() -> std::string {
      for (const std::string name : {"keys/worker.secret", "keys/new.user.public", "keys/../keys/worker.secret"})
        if (opening(folder_ / name, O_RDWR | O_CREAT).empty()) return name + " was opened";
      if (opening(folder_ / "keys/worker.secret").empty()) return "the secret was opened";
      if (::rename((folder_ / "keys").c_str(), (folder_ / "moved").c_str()) == 0) return "the folder was moved";
      if (::umount2((folder_ / "keys").c_str(), MNT_DETACH) == 0) return "what lies over it was taken away";
      if (const auto why = opening(folder_ / "data/rows", O_RDWR); !why.empty()) return "data: " + why;
      if (const auto why = opening(folder_ / "data/new", O_RDWR | O_CREAT); !why.empty()) return "new data: " + why;
      if (::rename((folder_ / "data/new").c_str(), (folder_ / "own/new").c_str()) != 0) return std::strerror(errno);
      return "";
    });
    EXPECT_EQ(found, "");
    EXPECT_EQ(test::file_text(folder_ / "keys/worker.secret"), "secret");
  }

  test::TempFolder folder_;
};

TEST_F(JobSeparationTest, KeysAreHiddenByMounts) { expect_keys_are_hidden(hiding(Hiding::kMounts)); }

TEST_F(JobSeparationTest, KeysAreHiddenByRules) { expect_keys_are_hidden(hiding(Hiding::kRules)); }

TEST_F(JobSeparationTest, KeysAreHiddenFromAnAccountWithoutRights) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another account";
  ASSERT_EQ(::chown((folder_ / "keys").c_str(), kNobody, kNobody), 0);
  ASSERT_EQ(::chown((folder_ / "keys/worker.secret").c_str(), kNobody, kNobody), 0);
  for (const Hiding how : {Hiding::kMounts, Hiding::kRules}) {
    const std::string found = test::in_child([&]() -> std::string {
      if (::setresgid(kNobody, kNobody, kNobody) != 0 || ::setresuid(kNobody, kNobody, kNobody) != 0)
        return "setresuid";
      ::prctl(PR_SET_DUMPABLE, 1);
      if (!opening(folder_ / "keys/worker.secret").empty()) return "the secret cannot be opened before";
      if (!try_separation(hiding(how))) return "";  // this machine gives it no such rights
      if (const auto done = separate_job(hiding(how)); !done) return done.error().message;
      return opening(folder_ / "keys/worker.secret").empty() ? "the secret was opened" : "";
    });
    EXPECT_EQ(found, "") << static_cast<int>(how);
  }
}

// The folder that lies below what hides it would be reached by a relative path.
TEST_F(JobSeparationTest, WorkingFolderOfKeysIsLeft) {
  if (const auto tried = try_separation(hiding(Hiding::kMounts)); !tried) GTEST_SKIP() << tried.error().message;
  EXPECT_EQ(test::in_child([&]() -> std::string {
              if (::chdir((folder_ / "keys").c_str()) != 0) return "chdir";
              if (const auto done = separate_job(hiding(Hiding::kMounts)); !done) return done.error().message;
              return opening("worker.secret").empty() ? "the secret was opened" : "";
            }),
            "");
}

TEST_F(JobSeparationTest, ProcessesThatAreNotItsOwnAreNeitherSignalledNorTraced) {
  if (landlock_version() < 6) GTEST_SKIP() << "this kernel's Landlock has no scope of signals";
  const pid_t outside = ::getpid();
  EXPECT_EQ(separated(hiding(Hiding::kRules),
                      [&]() -> std::string {
                        if (::kill(outside, 0) == 0) return "a process outside was signalled";
                        const std::string of_it = "/proc/" + std::to_string(outside);
                        if (opening(of_it + "/mem").empty()) return "its memory was opened";
                        if (opening(of_it + "/root/" + (folder_ / "keys/worker.secret")).empty())
                          return "its root was entered";
                        const pid_t child = ::fork();
                        if (child == 0) ::_exit(::pause());
                        const bool is_own = ::kill(child, SIGKILL) == 0;
                        ::waitpid(child, nullptr, 0);
                        return is_own ? "" : "a child could not be signalled";
                      }),
            "");
}

TEST_F(JobSeparationTest, WritesAreBoundedToItsOwnFolders) {
  const JobSeparation separation{.are_writes_bounded = true, .writable = {folder_ / "own"}};
  if (const auto tried = try_separation(separation); !tried) GTEST_SKIP() << tried.error().message;
  EXPECT_EQ(separated(separation,
                      [&]() -> std::string {
                        if (const auto why = opening(folder_ / "data/rows"); !why.empty()) return "reading: " + why;
                        if (opening(folder_ / "data/rows", O_WRONLY).empty()) return "data were opened for writing";
                        if (opening(folder_ / "data/new", O_WRONLY | O_CREAT).empty()) return "a file was made";
                        if (::truncate((folder_ / "data/rows").c_str(), 0) == 0) return "data were truncated";
                        if (::unlink((folder_ / "data/rows").c_str()) == 0) return "data were deleted";
                        if (::link((folder_ / "data/rows").c_str(), (folder_ / "own/rows").c_str()) == 0)
                          return "data were linked";
                        for (const std::string name : {"own/new", "own/other"})
                          if (const auto why = opening(folder_ / name, O_RDWR | O_CREAT); !why.empty())
                            return name + ": " + why;
                        if (::mkdir((folder_ / "own/below").c_str(), 0700) != 0) return "no folder of its own";
                        if (::rename((folder_ / "own/new").c_str(), (folder_ / "own/below/new").c_str()) != 0)
                          return "no rename";
                        if (const auto why = opening("/dev/null", O_RDWR); !why.empty()) return "/dev/null: " + why;
                        const FileDescriptor memory(::memfd_create("test", MFD_CLOEXEC));
                        return opening("/proc/self/fd/" + std::to_string(memory.get()), O_RDWR);
                      }),
            "");
  EXPECT_EQ(test::file_text(folder_ / "data/rows"), "rows");
}

TEST_F(JobSeparationTest, TmpIsItsOwnAndKeptFoldersStay) {
  const JobSeparation separation{.private_tmp = folder_ / "own", .kept = {folder_ / "data"}};
  if (const auto tried = try_separation(separation); !tried) GTEST_SKIP() << tried.error().message;
  if (!folder_.path().starts_with("/tmp/")) GTEST_SKIP() << "the folder of the test does not lie in /tmp";
  EXPECT_EQ(separated(separation,
                      [&]() -> std::string {
                        if (opening(folder_ / "keys/worker.secret") != "ENOENT")
                          return "another's file of /tmp is there";
                        if (const auto why = opening(folder_ / "data/rows"); !why.empty())
                          return "a kept folder: " + why;
                        if (const auto why = opening("/tmp/mine", O_RDWR | O_CREAT); !why.empty())
                          return "/tmp: " + why;
                        return opening("/dev/shm/penstock-test-mine", O_RDWR | O_CREAT);
                      }),
            "");
  EXPECT_EQ(opening(folder_ / "own/mine"), "");
  EXPECT_EQ(opening("/tmp/mine"), "ENOENT");
  EXPECT_EQ(opening("/dev/shm/penstock-test-mine"), "ENOENT");
}

TEST_F(JobSeparationTest, NetworkIsOutOfReach) {
  EXPECT_EQ(connecting(AF_INET), "ECONNREFUSED");
  for (const NoNetwork how : {NoNetwork::kNamespace, NoNetwork::kFilter}) {
    const JobSeparation separation{.no_network = how};
    if (!try_separation(separation)) continue;
    const std::string expected = how == NoNetwork::kFilter ? "EACCES" : "ENETUNREACH";
    EXPECT_EQ(separated(separation, [] { return connecting(AF_INET); }), expected);
    EXPECT_EQ(separated(separation, [] { return connecting(AF_VSOCK); }), "EACCES");
    EXPECT_EQ(separated(separation,
                        [] {
                          const FileDescriptor local(::socket(AF_UNIX, SOCK_STREAM, 0));
                          return local ? std::string() : std::string("no Unix socket");
                        }),
              "");
  }
}

// What listens there is reached by the job alone, and what listens at the machine's is not.
TEST_F(JobSeparationTest, LoopbackOfANamespaceIsItsOwn) {
  const JobSeparation separation{.no_network = NoNetwork::kNamespace, .has_loopback = true};
  if (const auto tried = try_separation(separation); !tried) GTEST_SKIP() << tried.error().message;
  sockaddr_in at{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero{}};
  socklen_t length = sizeof at;
  auto* const address = reinterpret_cast<sockaddr*>(&at);
  const FileDescriptor outside(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(outside.get(), address, length), 0);
  ASSERT_EQ(::listen(outside.get(), 1), 0);
  ASSERT_EQ(::getsockname(outside.get(), address, &length), 0);
  EXPECT_EQ(separated(separation,
                      [&]() -> std::string {
                        const FileDescriptor caller(::socket(AF_INET, SOCK_STREAM, 0));
                        if (::connect(caller.get(), address, length) == 0) return "the machine's was reached";
                        if (errno != ECONNREFUSED) return std::string("the machine's: ") + std::strerror(errno);
                        const FileDescriptor inside(::socket(AF_INET, SOCK_STREAM, 0));
                        if (::bind(inside.get(), address, length) != 0) return "bind";
                        if (::listen(inside.get(), 1) != 0) return "listen";
                        const FileDescriptor again(::socket(AF_INET, SOCK_STREAM, 0));
                        if (::connect(again.get(), address, length) != 0) return "its own was not reached";
                        sockaddr_in far = at;
                        far.sin_addr = {htonl(0xc0000201)};  // 192.0.2.1
                        const FileDescriptor away(::socket(AF_INET, SOCK_STREAM, 0));
                        ::connect(away.get(), reinterpret_cast<const sockaddr*>(&far), sizeof far);
                        return ::strerrorname_np(errno);
                      }),
            "ENETUNREACH");
}

TEST_F(JobSeparationTest, UidIsItsOwnAndTheEndOfTheParentStaysASignal) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another account";
  const JobSeparation separation{.private_tmp = folder_ / "own", .uid = 54321};
  if (const auto tried = try_separation(separation); !tried) GTEST_SKIP() << tried.error().message;
  EXPECT_EQ(test::in_child([&]() -> std::string {
              ::prctl(PR_SET_PDEATHSIG, SIGKILL);
              if (const auto done = separate_job(separation); !done) return done.error().message;
              int number = 0;
              ::prctl(PR_GET_PDEATHSIG, &number);
              if (number != SIGKILL) return "it would outlive its parent";
              if (::getuid() != 54321 || ::getegid() != 54321 || ::getgroups(0, nullptr) != 0) return "another account";
              if (::setuid(0) == 0) return "it is root again";
              return opening("/proc/self/environ");
            }),
            "");
}

TEST_F(JobSeparationTest, LimitsAndCoreDumpsAreSetWithoutAnyLevel) {
  EXPECT_EQ(separated({.data_bytes = uint64_t{1} << 32, .descriptor_count = 100},
                      []() -> std::string {
                        std::string found;
                        for (const auto resource : {RLIMIT_CORE, RLIMIT_DATA, RLIMIT_NOFILE}) {
                          rlimit is{};
                          ::getrlimit(resource, &is);
                          found += std::to_string(is.rlim_cur) + " " + std::to_string(is.rlim_max) + ", ";
                        }
                        return found;
                      }),
            "0 0, 4294967296 4294967296, 100 100, ");
}

TEST_F(JobSeparationTest, FolderThatCannotBeEnteredIsNamed) {
  const auto tried = try_separation({.descriptor_count = 64}, {folder_ / "missing"});
  ASSERT_FALSE(tried);
  EXPECT_EQ(tried.error().message,
            "reading " + (folder_ / "missing") + " was refused by the system: No such file or directory");
}

// ---- How keys are hidden

// On a machine that refuses the ways of `refused`.
KeyHiding chosen(const KeyHidingOptions& options, const std::set<Hiding>& refused) {
  return choose_key_hiding(options, [&](Hiding hiding) -> std::string {
    if (!refused.contains(hiding)) return "";
    return hiding == Hiding::kMounts ? "no mounts" : "no rules";
  });
}

TEST(KeyHiding, IsByMountsWhereTheyCanBeHad) {
  const KeyHiding found = chosen({.folder = "/tmp/keys"}, {});
  EXPECT_EQ(found.hiding, Hiding::kMounts);
  EXPECT_EQ(found.notice + found.trouble, "");
}

TEST(KeyHiding, IsByRulesWhereMountsAreRefused) {
  const KeyHiding found = chosen({.folder = "/nowhere/keys"}, {Hiding::kMounts});
  EXPECT_EQ(found.hiding, Hiding::kRules);
  EXPECT_EQ(found.trouble, "");
  EXPECT_EQ(found.notice,
            "Landlock protects the keys from jobs, because no mounts: files created directly in /nowhere or above "
            "while a job runs are not readable by the job");
}

TEST(KeyHiding, IsByRulesBesideAnybodysFilesOnDemandAlone) {
  const test::TempFolder folder;
  ::chmod(folder.path().c_str(), 01777);
  const KeyHiding found = chosen({.folder = folder / "keys", .way_to_demand = "name them"}, {Hiding::kMounts});
  EXPECT_EQ(found.hiding, Hiding::kNone);
  EXPECT_EQ(found.notice, "");
  EXPECT_EQ(found.trouble,
            "no mounts, and with Landlock, jobs could not access new files in " + folder.path() +
                ", the folder of the keys; store the keys elsewhere (XDG_RUNTIME_DIR, or --keys), or name "
                "them");
  EXPECT_EQ(chosen({.folder = folder / "keys", .is_demanded = true}, {Hiding::kMounts}).hiding, Hiding::kRules);
}

TEST(KeyHiding, IsNoneWhereBothAreRefused) {
  const KeyHiding found = chosen({.folder = "/nowhere/keys"}, {Hiding::kMounts, Hiding::kRules});
  EXPECT_EQ(found.hiding, Hiding::kNone);
  EXPECT_TRUE(found.trouble.starts_with("no mounts, and no rules; ")) << found.trouble;
}

TEST(KeyHiding, IsNoneWhereJobsLoadCodeFromTheFolder) {
  for (const std::string needed : {"/home/ann/keys", "/home/ann/keys/lib/lib.so"}) {
    const KeyHiding found = chosen({.folder = "/home/ann/keys", .needed = {"/home/ann/keys-and-more", needed}}, {});
    EXPECT_EQ(found.hiding, Hiding::kNone);
    EXPECT_EQ(found.trouble, "the key folder /home/ann/keys contains " + needed +
                                 ", from which jobs load code; keep the keys in a separate folder");
  }
  EXPECT_EQ(chosen({.folder = "/home/ann/keys", .needed = {"/home/ann"}}, {}).hiding, Hiding::kMounts);
}

}  // namespace
}  // namespace penstock
