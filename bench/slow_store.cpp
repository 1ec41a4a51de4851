// SPDX-License-Identifier: Apache-2.0
// A file system that shows a folder, read-only, and sleeps before each read of a file,
// as a store with seeks does. The kernel's cache works as for any other: what it holds is read without a wait.
//
// Usage: slow_store FOLDER MILLISECONDS -f -o max_background=64 MOUNTPOINT
#define FUSE_USE_VERSION 31
#include <dirent.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

namespace {

std::string folder;
std::chrono::milliseconds delay;

std::string place(const char* path) { return folder + path; }

void seek() { std::this_thread::sleep_for(delay); }

void* init(fuse_conn_info*, fuse_config* config) {
  config->kernel_cache = 1;  // the files do not change
  config->entry_timeout = config->attr_timeout = 3600;
  return nullptr;
}

int get_attributes(const char* path, struct stat* about, fuse_file_info*) {
  return ::lstat(place(path).c_str(), about) == 0 ? 0 : -errno;
}

int list(const char* path, void* names, fuse_fill_dir_t add, off_t, fuse_file_info*, fuse_readdir_flags) {
  DIR* const entries = ::opendir(place(path).c_str());
  if (entries == nullptr) return -errno;
  while (const dirent* entry = ::readdir(entries)) add(names, entry->d_name, nullptr, 0, fuse_fill_dir_flags{});
  ::closedir(entries);
  return 0;
}

int open_file(const char* path, fuse_file_info* file) {
  const int fd = ::open(place(path).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -errno;
  file->fh = static_cast<uint64_t>(fd);
  return 0;
}

int read_file(const char*, char* bytes, size_t count, off_t from, fuse_file_info* file) {
  seek();
  const ssize_t read = ::pread(static_cast<int>(file->fh), bytes, count, from);
  return read < 0 ? -errno : static_cast<int>(read);
}

int close_file(const char*, fuse_file_info* file) { return ::close(static_cast<int>(file->fh)); }

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  folder = argv[1];
  delay = std::chrono::milliseconds(std::atoi(argv[2]));
  fuse_operations operations{};
  operations.init = init;
  operations.getattr = get_attributes;
  operations.readdir = list;
  operations.open = open_file;
  operations.read = read_file;
  operations.release = close_file;
  argv[2] = argv[0];
  return fuse_main(argc - 2, argv + 2, &operations, nullptr);
}
