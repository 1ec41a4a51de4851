// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file of visits, written by the trainer and read by `penstock visits`.
//
// A record is copied into a shared mapping of the file. From then on it is in the kernel's page cache, so that it
// survives any death of the process, and no system call is needed for a batch. It does not survive a failure of the
// machine before the kernel has written it back. The file's blocks are allocated before they are mapped: a full disk is
// an error of append() and not a SIGBUS. The pages of the mapping are made by a thread of their own, since the first
// write to a page of a file takes longer than a record.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/result.h"
#include "visits/merkle_tree.h"
#include "visits/visit_record.h"

namespace penstock::visits {

// A mapping of memory. Moved, not copied.
class FileMapping {
 public:
  FileMapping() = default;
  FileMapping(FileMapping&& other) noexcept { *this = std::move(other); }
  FileMapping& operator=(FileMapping&& other) noexcept;
  ~FileMapping();

  // Maps a part of a file. `offset` is a multiple of the page size. With `is_writable`, a forked child has no such
  // mapping.
  static Result<FileMapping> map(int fd, uint64_t offset, uint64_t size, bool is_writable);
  // Maps a page that is zero in a forked child.
  static Result<FileMapping> page_of_process();

  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }

  // Makes the pages of a writable mapping, which keep their content. Linux before 5.14 makes each when it is first
  // written.
  void make_pages() const;

 private:
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

// The writer. A file has one at a time, on this machine. Confined to one thread, of the process that opened it.
class VisitRecorder {
 public:
  // Opens or creates a file, and appends a record of the session. Bytes of an unfinished record at its end, as a power
  // failure may leave them, are removed; repair() names them. kFailed if another process records into it, or the
  // system refuses; the errors of parse_header() for other files, which stay as they are.
  static Result<std::unique_ptr<VisitRecorder>> open(const std::string& path, RankOfJob rank, const Session& session);

  VisitRecorder(const VisitRecorder&) = delete;
  VisitRecorder& operator=(const VisitRecorder&) = delete;
  ~VisitRecorder();

  // Records a batch that is given next. kFailed if the file cannot grow.
  Result<void> append(uint32_t epoch, int64_t step, std::span<const int64_t> indices, uint16_t flags);
  // Records a batch of the samples first, first + 1 and so on.
  Result<void> append_run(uint32_t epoch, int64_t step, int64_t first, uint32_t count);
  // Records a batch of which only the number of samples is known.
  Result<void> append_unknown(uint32_t epoch, int64_t step, uint32_t count);
  // Records that an epoch has ended after `steps` steps.
  Result<void> end_epoch(uint32_t epoch, int64_t steps);
  // Records facts that have changed.
  Result<void> append_session(const Session& session);

  // Cuts the file to its content and closes it. A second call does nothing.
  void close();

  const std::string& repair() const { return repair_; }
  // The last epoch that has a record, and whether it has ended; the values before this session's first batch.
  int64_t last_epoch() const { return last_epoch_; }
  bool has_last_ended() const { return has_last_ended_; }
  uint64_t bytes() const { return end_; }

 private:
  VisitRecorder(std::string path, FileDescriptor file) : path_(std::move(path)), file_(std::move(file)) {}

  Result<void> append_plain(uint32_t epoch, int64_t step, int64_t base, uint32_t count, uint16_t flags);
  bool is_owner() const { return is_owner_.data() != nullptr && *is_owner_.data() != std::byte{0}; }
  // Returns where a record with a body of `body_bytes` is to be written; an error if the file cannot grow.
  Result<std::byte*> room_for(uint64_t body_bytes);
  void finish(std::byte* record, uint64_t body_bytes, RecordKind kind, uint8_t width, uint16_t flags);
  Fault refused(const std::string& what) const;

  std::string path_;
  FileDescriptor file_;
  std::string repair_;
  std::shared_ptr<const FileMapping> window_ = std::make_shared<FileMapping>();
  uint64_t window_offset_ = 0;
  uint64_t end_ = 0;  // of the content, in the file
  uint64_t chain_ = 0;
  int64_t last_epoch_ = -1;
  bool has_last_ended_ = false;
  // Not zero in the process that opened the file, once it is open: getpid() is a system call, which takes longer than
  // all the rest.
  FileMapping is_owner_;
};

// The reader: the complete records of a file, which may still be written. Thread-compatible.
class VisitFile {
 public:
  // Errors name the file. The errors of parse_header(), or kFailed if it cannot be read.
  static Result<VisitFile> open(const std::string& path);

  const std::string& path() const { return path_; }
  RankOfJob rank() const { return rank_; }

  // Calls `visit` for each complete record in turn, and stops at the first error that it returns.
  using Visitor = std::function<Result<void>(const RecordView& record, uint64_t offset)>;
  Result<void> read(const Visitor& visit);
  // The record at an offset that read() has given.
  RecordView record_at(uint64_t offset) const;

  // Whether the records end at `end`, with the one at `last_offset`, which has this chain. Reads that one only.
  bool is_at_end(uint64_t last_offset, uint64_t end, uint64_t chain) const;

  // After read(). The end of the last complete record, and its chain and place.
  uint64_t end() const { return end_; }
  uint64_t chain() const { return chain_; }
  uint64_t last_offset() const { return last_offset_; }
  // The bytes from end() to the last one that is not zero: an unfinished or damaged record, and everything after it.
  uint64_t torn_bytes() const { return torn_bytes_; }
  // Whether records follow that were written after the damaged one, so that bytes were changed and not cut off.
  bool is_damaged_inside() const { return is_damaged_inside_; }

 private:
  bool is_record(uint64_t offset, uint64_t chain_before) const;
  // Whether another record follows what would be a record at `offset`.
  bool is_followed(uint64_t offset, uint64_t last) const;

  std::string path_;
  RankOfJob rank_;
  FileMapping mapping_;
  uint64_t end_ = 0;
  uint64_t chain_ = 0;
  uint64_t last_offset_ = 0;
  uint64_t torn_bytes_ = 0;
  bool is_damaged_inside_ = false;
};

// The tree of a file's batches, and where its records are.
struct VisitTree {
  MerkleTree tree;
  Hash root{};
  uint64_t leaf_count = 0;
  std::vector<uint64_t> block_offsets;    // of the first record of each block of MerkleTree::kBlockLeaves batches
  std::vector<uint64_t> session_offsets;  // of each record of a session
};

// Makes the tree by reading the file.
Result<VisitTree> make_tree(VisitFile& file);
// Stores a tree in "PATH.tree", for load_tree(). `file` was read to its end.
Result<void> store_tree(const VisitFile& file, const VisitTree& tree);
// Returns the stored tree. kMismatch if there is none, or the file has changed since. With `root_only` the hashes and
// the offsets of blocks stay unread, which takes three pages of the two files at any size.
Result<VisitTree> load_tree(const VisitFile& file, bool root_only);
// Returns the hash of a leaf by its record.
MerkleTree::LeafReader leaf_reader(const VisitFile& file, const VisitTree& tree);
// The offset of the record of batch number `index`.
uint64_t offset_of(const VisitFile& file, const VisitTree& tree, uint64_t index);

// The name of a rank's file in a folder: "visits.rank0of4".
std::string file_name(RankOfJob rank);

}  // namespace penstock::visits
