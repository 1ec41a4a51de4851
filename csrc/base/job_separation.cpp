// SPDX-License-Identifier: Apache-2.0
#include "base/job_separation.h"

#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>

#include "base/file_descriptor.h"

namespace penstock {

namespace {

using Hiding = JobSeparation::Hiding;
using NoNetwork = JobSeparation::NoNetwork;

Fault refused(const std::string& what) {
  return {Errc::kUnsupported, what + " was refused by the system: " + std::strerror(errno)};
}

// ---- Landlock. The build machine's headers may be older than the running kernel, so all definitions are here.

constexpr long kCreateRuleset = 444;
constexpr long kAddRule = 445;
constexpr long kRestrictSelf = 446;
constexpr uint32_t kQueryVersion = 1;
constexpr int kPathBeneath = 1;

constexpr uint64_t kExecute = 1 << 0;
constexpr uint64_t kWriteFile = 1 << 1;
constexpr uint64_t kReadFile = 1 << 2;
constexpr uint64_t kMakeBlock = 1 << 11;
constexpr uint64_t kRefer = 1 << 13;     // since version 2
constexpr uint64_t kTruncate = 1 << 14;  // since version 3
// REMOVE_DIR, REMOVE_FILE, MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM
constexpr uint64_t kChangeFolder = 0x1ff0;
constexpr uint64_t kOfFiles = kExecute | kWriteFile | kReadFile | kTruncate;
constexpr uint64_t kScopeAbstractSockets = 1 << 0;  // both since version 6
constexpr uint64_t kScopeSignals = 1 << 1;

struct RulesetAttributes {
  uint64_t handled_files;
  uint64_t handled_network;
  uint64_t scoped;
};
struct __attribute__((packed)) PathRule {
  uint64_t allowed;
  int32_t parent_fd;
};

// Confined to the only thread of the process.
class Ruleset {
 public:
  static Result<Ruleset> make(uint64_t handled, uint64_t scoped, int version) {
    if (version < 2) handled &= ~kRefer;
    if (version < 3) handled &= ~kTruncate;
    if (version < 6) scoped = 0;
    const RulesetAttributes attributes{.handled_files = handled, .handled_network = 0, .scoped = scoped};
    // A kernel rejects a structure longer than the one it knows, unless the rest is zero.
    FileDescriptor fd(static_cast<int>(::syscall(kCreateRuleset, &attributes, sizeof(attributes), 0U)));
    if (!fd) return refused("a Landlock ruleset");
    ::fcntl(fd.get(), F_SETFD, FD_CLOEXEC);
    return Ruleset(std::move(fd), handled);
  }

  // A missing path needs no rule.
  Result<void> grant(const std::string& path, uint64_t allowed, int flags = 0) {
    const FileDescriptor place(::open(path.c_str(), O_PATH | O_CLOEXEC | flags));
    struct stat status {};
    if (!place || ::fstat(place.get(), &status) != 0 || S_ISLNK(status.st_mode)) return {};
    allowed &= handled_;
    if (!S_ISDIR(status.st_mode)) allowed &= kOfFiles;
    if (allowed == 0) return {};
    const PathRule rule{.allowed = allowed, .parent_fd = place.get()};
    if (::syscall(kAddRule, fd_.get(), kPathBeneath, &rule, 0U) != 0) return refused("a Landlock rule for " + path);
    return {};
  }

  // Grants everything below `folder` except the contents of `hidden`.
  Result<void> grant_but(const std::string& folder, const std::vector<std::string>& hidden) {
    const std::string inside = folder == "/" ? folder : folder + "/";
    const auto leads_there = [&](const std::string& path) { return path.starts_with(inside); };
    if (std::find(hidden.begin(), hidden.end(), folder) != hidden.end()) return {};
    if (std::none_of(hidden.begin(), hidden.end(), leads_there)) return grant(folder, ~uint64_t{0}, O_NOFOLLOW);
    const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(folder.c_str()), &::closedir);
    if (!entries) return refused("reading " + folder);
    while (const dirent* entry = ::readdir(entries.get())) {
      const std::string_view name = entry->d_name;
      if (name == "." || name == "..") continue;
      if (auto granted = grant_but(inside + std::string(name), hidden); !granted) return granted;
    }
    return {};
  }

  Result<void> restrict_self() const {
    if (::syscall(kRestrictSelf, fd_.get(), 0U) != 0) return refused("restricting a process by Landlock");
    return {};
  }

 private:
  Ruleset(FileDescriptor fd, uint64_t handled) : fd_(std::move(fd)), handled_(handled) {}

  FileDescriptor fd_;
  uint64_t handled_;
};

std::vector<std::string> resolved(const std::vector<std::string>& folders) {
  std::vector<std::string> found;
  for (const auto& folder : folders) {
    const std::unique_ptr<char, void (*)(void*)> path(::realpath(folder.c_str(), nullptr), &std::free);
    if (path) found.emplace_back(path.get());
  }
  return found;
}

// Files that programs write to regardless of where they run. Does not include disk and memory devices.
constexpr std::array kWritableFiles{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty",
                                    "/dev/ptmx", "/dev/pts",  "/dev/dri",  "/dev/kfd",    "/proc/self/"};

Result<std::vector<Ruleset>> rulesets(const JobSeparation& separation) {
  std::vector<Ruleset> made;
  const int version = landlock_version();
  // Before version 2 any ruleset forbids moving a file from one folder to another.
  if (version >= 2) {
    // Having any rule keeps a process from tracing processes outside its domain, and from changing mounts.
    const uint64_t scoped = kScopeSignals | (separation.no_network == NoNetwork::kNone ? 0 : kScopeAbstractSockets);
    auto ruleset = Ruleset::make(kMakeBlock | kRefer, scoped, version);
    if (!ruleset) return ruleset.error();
    if (auto granted = ruleset.value().grant("/", kRefer); !granted) return granted.error();
    made.push_back(std::move(ruleset).value());
  }
  if (separation.hiding == Hiding::kRules) {
    // Names stay readable: Python looks for modules in the folders that lead to the keys.
    auto ruleset = Ruleset::make(kOfFiles | kChangeFolder | kRefer, 0, version);
    if (!ruleset) return ruleset.error();
    if (auto granted = ruleset.value().grant_but("/", resolved(separation.hidden)); !granted) return granted.error();
    made.push_back(std::move(ruleset).value());
  }
  if (separation.are_writes_bounded) {
    auto ruleset = Ruleset::make(kWriteFile | kTruncate | kChangeFolder | kRefer, 0, version);
    if (!ruleset) return ruleset.error();
    const auto grant = [&](const std::string& path, uint64_t allowed) { return ruleset.value().grant(path, allowed); };
    if (auto granted = grant("/", kRefer); !granted) return granted.error();
    for (const char* const path : kWritableFiles)
      if (auto granted = grant(path, kWriteFile | kTruncate); !granted) return granted.error();
    if (const std::unique_ptr<DIR, int (*)(DIR*)> devices(::opendir("/dev"), &::closedir); devices)
      while (const dirent* entry = ::readdir(devices.get()))
        if (std::string_view(entry->d_name).starts_with("nvidia"))
          if (auto granted = grant(std::string("/dev/") + entry->d_name, kWriteFile); !granted) return granted.error();
    std::vector<std::string> writable{"/dev/shm"};
    if (!separation.private_tmp.empty()) writable.insert(writable.end(), {"/tmp", "/var/tmp"});
    writable.insert(writable.end(), separation.writable.begin(), separation.writable.end());
    for (const auto& path : writable)
      if (auto granted = grant(path, ~uint64_t{0}); !granted) return granted.error();
    made.push_back(std::move(ruleset).value());
  }
  return made;
}

// ---- seccomp

#if defined(__x86_64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
#else
constexpr uint32_t kArchitecture = 0;  // no filter
#endif
constexpr uint32_t kForeignCalls = 0x40000000;  // the x32 bit, which is above all numbers on other architectures
constexpr uint32_t kIoUringSetup = 425;         // which creates sockets past the filter

// Refuses sockets of `family`, or all other sockets if `is_alone`. Permanent, and inherited by child processes.
Result<void> filter_sockets(uint32_t family, bool is_alone) {
  if (kArchitecture == 0) return Fault{Errc::kUnsupported, "this processor architecture has no system call filter"};
  const auto refuse = [](int error) { return static_cast<uint32_t>(SECCOMP_RET_ERRNO | error); };
  const auto load = [](size_t offset) {
    return sock_filter{.code = BPF_LD | BPF_W | BPF_ABS, .jt = 0, .jf = 0, .k = static_cast<uint32_t>(offset)};
  };
  const auto jump = [](int how, uint32_t value, uint8_t if_so, uint8_t if_not) {
    return sock_filter{.code = static_cast<uint16_t>(BPF_JMP | how | BPF_K), .jt = if_so, .jf = if_not, .k = value};
  };
  const auto end = [](uint32_t value) { return sock_filter{.code = BPF_RET | BPF_K, .jt = 0, .jf = 0, .k = value}; };
  constexpr size_t kFirstArgument = offsetof(seccomp_data, args);  // the low half, on little-endian machines
  std::array program{
      load(offsetof(seccomp_data, arch)),
      jump(BPF_JEQ, kArchitecture, 1, 0),
      end(refuse(ENOSYS)),
      load(offsetof(seccomp_data, nr)),
      jump(BPF_JGE, kForeignCalls, 0, 1),
      end(refuse(ENOSYS)),
      jump(BPF_JEQ, kIoUringSetup, 0, 1),
      end(refuse(ENOSYS)),
      jump(BPF_JEQ, SYS_socket, 1, 0),
      end(SECCOMP_RET_ALLOW),
      load(kFirstArgument),
      jump(BPF_JEQ, family, is_alone ? uint8_t{1} : uint8_t{0}, is_alone ? uint8_t{0} : uint8_t{1}),
      end(refuse(EACCES)),
      end(SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{.len = static_cast<unsigned short>(program.size()), .filter = program.data()};
  if (::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter) != 0) return refused("a system call filter");
  return {};
}

// ---- Namespaces and mounts

bool has_capability(unsigned number) {
  __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  std::array<__user_cap_data_struct, 2> data{};
  if (::syscall(SYS_capget, &header, data.data()) != 0) return false;
  return (data.at(number / 32).effective >> (number % 32) & 1) != 0;
}

Result<void> write_once(const char* path, const std::string& text) {
  const FileDescriptor file(::open(path, O_WRONLY | O_CLOEXEC));
  if (!file || ::write(file.get(), text.data(), text.size()) < 0) return refused(std::string("writing ") + path);
  return {};
}

// Maps only the user and the group of the process.
Result<void> enter_user_namespace() {
  const std::string user = std::to_string(::geteuid());
  const std::string group = std::to_string(::getegid());
  if (::unshare(CLONE_NEWUSER) != 0) return refused("a user namespace");
  if (auto written = write_once("/proc/self/setgroups", "deny"); !written) return written;
  if (auto written = write_once("/proc/self/gid_map", group + " " + group + " 1"); !written) return written;
  return write_once("/proc/self/uid_map", user + " " + user + " 1");
}

Result<void> mount_empty(const std::string& folder, unsigned long flags, const char* options) {
  if (::mount("penstock", folder.c_str(), "tmpfs", flags | MS_NOSUID | MS_NODEV, options) != 0)
    return refused("an empty folder over " + folder);
  return {};
}

Result<void> make_folders(const std::string& path) {
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string part = path.substr(0, end);
    if (::mkdir(part.c_str(), 0755) != 0 && errno != EEXIST) return refused("making " + part);
    if (end == std::string::npos) return {};
  }
}

bool is_below(const std::string& path, std::string_view folder) {
  if (folder == "/") return true;
  return path.starts_with(folder) && (path.size() == folder.size() || path[folder.size()] == '/');
}

Result<void> have_private_tmp(const JobSeparation& separation) {
  // Their descriptors still reach them once other folders are mounted over them.
  std::vector<std::pair<std::string, FileDescriptor>> kept;
  for (const auto& path : separation.kept) {
    if (!is_below(path, "/tmp") && !is_below(path, "/var/tmp")) continue;
    FileDescriptor place(::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (place) kept.emplace_back(path, std::move(place));
  }
  const FileDescriptor own(::open(separation.private_tmp.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!own) return refused("opening " + separation.private_tmp);
  const auto bind = [](const FileDescriptor& from, const std::string& to) -> Result<void> {
    const std::string source = "/proc/self/fd/" + std::to_string(from.get());
    if (::mount(source.c_str(), to.c_str(), nullptr, MS_BIND | MS_REC, nullptr) != 0) return refused("a private " + to);
    return {};
  };
  for (const char* const place : {"/tmp", "/var/tmp"}) {
    struct stat status {};
    if (::lstat(place, &status) != 0 || !S_ISDIR(status.st_mode)) continue;  // a link leads to the other one
    if (auto bound = bind(own, place); !bound) return bound;
  }
  for (const auto& [path, place] : kept) {
    if (auto made = make_folders(path); !made) return made;
    if (auto bound = bind(place, path); !bound) return bound;
  }
  struct stat status {};
  if (::lstat("/dev/shm", &status) == 0 && S_ISDIR(status.st_mode)) return mount_empty("/dev/shm", 0, "mode=1777");
  return {};
}

// In a network namespace that this process has just created.
Result<void> bring_up_loopback() {
  const FileDescriptor any(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq device{};
  std::string_view("lo").copy(device.ifr_name, IFNAMSIZ - 1);
  device.ifr_flags = IFF_UP;
  if (!any || ::ioctl(any.get(), SIOCSIFFLAGS, &device) != 0) return refused("a loopback device");
  return {};
}

Result<void> enter_namespaces(const JobSeparation& separation) {
  const bool has_tmp = !separation.private_tmp.empty();
  const bool has_mounts = separation.hiding == Hiding::kMounts || has_tmp;
  const bool has_network = separation.no_network == NoNetwork::kNamespace;
  if (!has_mounts && !has_network) return {};
  if (!has_capability(CAP_SYS_ADMIN))
    if (auto entered = enter_user_namespace(); !entered) return entered;
  if (has_network && ::unshare(CLONE_NEWNET) != 0) return refused("a network namespace");
  if (has_network && separation.has_loopback)
    if (auto done = bring_up_loopback(); !done) return done;
  if (has_tmp && ::unshare(CLONE_NEWIPC) != 0) return refused("an IPC namespace");
  if (!has_mounts) return {};
  if (::unshare(CLONE_NEWNS) != 0) return refused("a mount namespace");
  // Later mounts of the machine are visible here; mounts made here are not visible there.
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_SLAVE, nullptr) != 0) return refused("a private mount namespace");
  std::array<char, PATH_MAX> before{};
  const bool has_before = ::getcwd(before.data(), before.size()) != nullptr;
  if (separation.hiding == Hiding::kMounts)
    for (const auto& folder : resolved(separation.hidden))
      if (auto hidden = mount_empty(folder, MS_RDONLY | MS_NOEXEC, "mode=0,size=4k"); !hidden) return hidden;
  if (has_tmp)
    if (auto made = have_private_tmp(separation); !made) return made;
  // The working folder would otherwise still be the covered one.
  if (!has_before || ::chdir(before.data()) != 0)
    if (::chdir(has_tmp ? "/tmp" : "/") != 0) return refused("leaving the working folder");
  return {};
}

// ---- The account, capabilities and limits

Result<void> become(uint32_t uid) {
  if (::setgroups(0, nullptr) != 0 || ::setresgid(uid, uid, uid) != 0 || ::setresuid(uid, uid, uid) != 0)
    return refused("the uid " + std::to_string(uid));
  return {};
}

// Root that has not entered a user namespace here keeps the capabilities to use files as root; others keep none.
Result<void> drop_capabilities(bool is_plain_root) {
  uint64_t kept = 0;
  if (is_plain_root)
    for (const unsigned number : {CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_IPC_LOCK, CAP_SYS_NICE})
      kept |= uint64_t{1} << number;
  for (unsigned number = 0; number < 64; ++number)
    if ((kept >> number & 1) == 0) ::prctl(PR_CAPBSET_DROP, number, 0, 0, 0);  // needs CAP_SETPCAP; otherwise a no-op
  ::prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
  __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  std::array<__user_cap_data_struct, 2> data{};
  if (::syscall(SYS_capget, &header, data.data()) != 0) return refused("reading capabilities");
  for (size_t half = 0; half < 2; ++half) {
    const auto mask = static_cast<uint32_t>(kept >> (32 * half));
    data.at(half).permitted &= mask;
    data.at(half).effective &= mask;
    data.at(half).inheritable = 0;
  }
  if (::syscall(SYS_capset, &header, data.data()) != 0) return refused("dropping capabilities");
  return {};
}

Result<void> set_limit(decltype(RLIMIT_CORE) resource, const char* name, uint64_t value) {
  rlimit now{};
  ::getrlimit(resource, &now);
  const rlim_t most = std::min<rlim_t>(value, now.rlim_max);
  const rlimit wanted{.rlim_cur = most, .rlim_max = most};
  if (::setrlimit(resource, &wanted) != 0) return refused(std::string("the limit ") + name);
  return {};
}

Result<void> set_limits(const JobSeparation& separation) {
  if (auto limited = set_limit(RLIMIT_CORE, "RLIMIT_CORE", 0); !limited) return limited;
  if (separation.data_bytes)
    if (auto limited = set_limit(RLIMIT_DATA, "RLIMIT_DATA", *separation.data_bytes); !limited) return limited;
  if (separation.descriptor_count)
    if (auto limited = set_limit(RLIMIT_NOFILE, "RLIMIT_NOFILE", *separation.descriptor_count); !limited)
      return limited;
  if (separation.process_count)
    if (auto limited = set_limit(RLIMIT_NPROC, "RLIMIT_NPROC", *separation.process_count); !limited) return limited;
  return {};
}

}  // namespace

int landlock_version() {
  const long version = ::syscall(kCreateRuleset, nullptr, size_t{0}, kQueryVersion);
  return version > 0 ? static_cast<int>(version) : 0;
}

Result<void> separate_job(const JobSeparation& separation) {
  if (auto limited = set_limits(separation); !limited) return limited;
  if (!separation.has_any()) return {};
  if (landlock_version() == 0 && (separation.hiding == Hiding::kRules || separation.are_writes_bounded))
    return Fault{Errc::kUnsupported, "this kernel has no Landlock"};
  int end_signal = 0;  // sent when the parent ends; the system resets it when the account changes
  ::prctl(PR_GET_PDEATHSIG, &end_signal);
  const bool is_root = ::geteuid() == 0 && has_capability(CAP_SYS_ADMIN);
  if (auto entered = enter_namespaces(separation); !entered) return entered;
  auto rules = rulesets(separation);
  if (!rules) return rules.error();
  if (auto dropped = separation.uid ? become(*separation.uid) : Result<void>(); !dropped) return dropped;
  if (auto dropped = drop_capabilities(is_root && !separation.uid); !dropped) return dropped;
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return refused("no_new_privs");
  for (const auto& ruleset : rules.value())
    if (auto restricted = ruleset.restrict_self(); !restricted) return restricted;
  // A network namespace leaves sockets between virtual machines; without one, all sockets but Unix ones are left.
  if (separation.no_network == NoNetwork::kFilter)
    if (auto filtered = filter_sockets(AF_UNIX, true); !filtered) return filtered;
  if (separation.no_network == NoNetwork::kNamespace && kArchitecture != 0)
    if (auto filtered = filter_sockets(AF_VSOCK, false); !filtered) return filtered;
  ::prctl(PR_SET_PDEATHSIG, end_signal);
  ::prctl(PR_SET_DUMPABLE, 1);  // otherwise the process could not open its /proc/self
  return {};
}

Result<void> try_separation(const JobSeparation& separation, const std::vector<std::string>& needed) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return refused("a pipe");
  const FileDescriptor reading(ends[0]);
  FileDescriptor writing(ends[1]);
  const pid_t child = ::fork();
  if (child < 0) return refused("a process");
  if (child == 0) {
    auto separated = separate_job(separation);
    for (const auto& path : needed)
      if (separated && ::access(path.c_str(), R_OK | X_OK) != 0) separated = refused("reading " + path);
    const std::string said = separated ? "y" : "n" + separated.error().message;
    const bool is_written = ::write(writing.get(), said.data(), said.size()) == static_cast<ssize_t>(said.size());
    ::_exit(is_written ? 0 : 1);
  }
  writing.reset();
  std::string said;
  std::array<char, 4096> piece{};
  for (;;) {
    const ssize_t count = ::read(reading.get(), piece.data(), piece.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    said.append(piece.data(), static_cast<size_t>(count));
  }
  while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  if (said.starts_with('y')) return {};
  return Fault{Errc::kUnsupported, said.empty() ? "the test process was killed" : said.substr(1)};
}

KeyHiding choose_key_hiding(const KeyHidingOptions& options, const std::function<std::string(Hiding)>& refusal) {
  for (const auto& path : options.needed)
    if (is_below(path, options.folder))
      return {.trouble = "the key folder " + options.folder + " contains " + path +
                         ", from which jobs load code; keep the keys in a separate folder"};
  const std::string no_mounts = refusal(Hiding::kMounts);
  if (no_mounts.empty()) return {.hiding = Hiding::kMounts};
  const std::string parent = options.folder.substr(0, std::max<size_t>(options.folder.rfind('/'), 1));
  struct stat status {};
  const bool is_anybodys = ::stat(parent.c_str(), &status) == 0 && (status.st_mode & S_IWOTH) != 0;
  if (is_anybodys && !options.is_demanded)
    return {.trouble = no_mounts + ", and with Landlock, jobs could not access new files in " + parent +
                       ", the folder of the keys; store the keys elsewhere (XDG_RUNTIME_DIR, or --keys)" +
                       (options.way_to_demand.empty() ? "" : ", or " + options.way_to_demand)};
  const std::string no_rules = refusal(Hiding::kRules);
  if (no_rules.empty())
    return {.hiding = Hiding::kRules,
            .notice = "Landlock protects the keys from jobs, because " + no_mounts + ": files created directly in " +
                      parent + " or above while a job runs are not readable by the job"};
  return {.trouble = no_mounts + ", and " + no_rules +
                     "; run the worker where user namespaces are permitted, or on Linux 5.19 or later with Landlock"};
}

}  // namespace penstock
