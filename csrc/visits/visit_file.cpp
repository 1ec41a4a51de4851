// SPDX-License-Identifier: Apache-2.0
#include "visits/visit_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/bytes.h"
#include "base/process.h"

namespace penstock::visits {
namespace {

// The part of the file that is mapped for writing. The file grows by as much: 4,500 batches of 64.
constexpr uint64_t kWindowBytes = 1 << 20;
constexpr uint64_t kPageBytes = 1 << 12;
static_assert(kWindowBytes % kPageBytes == 0);
// Packing::write() may write as many bytes more than a record has.
constexpr uint64_t kSlackBytes = 16;

constexpr uint64_t kTornBytesMax = 1 << 20;

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; glibc 2.36 has it
#endif

constexpr std::string_view kTreeMagic = "PNSTKTRE";
constexpr uint32_t kTreeVersion = 1;

std::string system_error(int error) { return std::strerror(error); }

Fault named(const std::string& path, const Fault& fault, const std::string& remedy) {
  return {fault.code, path + ": " + fault.message + remedy};
}

struct TreeHeader {
  char magic[8];
  uint32_t version;
  uint32_t session_count;
  uint64_t leaf_count;
  uint64_t end;          // of the records that the tree has
  uint64_t last_offset;  // of the last one
  uint64_t chain;        // after it
  Hash root;
  std::array<uint64_t, 4> rest_digest;    // of what follows the sessions' offsets
  std::array<uint64_t, 4> header_digest;  // of the fields before, and the sessions' offsets
};
static_assert(sizeof(TreeHeader) == 144);

std::array<uint64_t, 4> digest_of(const TreeHeader& header, std::span<const uint64_t> session_offsets) {
  ContentDigest digest;
  digest.add(std::as_bytes(std::span(&header, 1)).first(offsetof(TreeHeader, header_digest)));
  digest.add(std::as_bytes(session_offsets));
  return digest.value();
}

std::string tree_path(const VisitFile& file) { return file.path() + ".tree"; }

Fault no_tree(const VisitFile& file) { return {Errc::kMismatch, tree_path(file) + " is not of " + file.path()}; }

// Takes a lock of this process, which the workers that it forks do not hold.
Result<void> lock_file(int fd) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  if (::fcntl(fd, F_SETLK, &lock) == 0) return {};
  if (errno != EAGAIN && errno != EACCES) return Fault{Errc::kFailed, system_error(errno)};
  return Fault{Errc::kFailed, "another process records into it; give each program another folder"};
}

// Has a thread make the pages, in their order, ahead of the records. Without the thread each record makes its own.
void make_pages_ahead(std::shared_ptr<const FileMapping> window) {
  try {
    std::thread([window = std::move(window)] {
      begin_own_thread("pk_visits");
      window->make_pages();
    }).detach();
  } catch (const std::system_error&) {
    return;  // the system has no thread left
  }
}

template <typename T>
bool read_all(std::ifstream& stream, std::vector<T>& values, uint64_t count) {
  values.resize(count);
  stream.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(count * sizeof(T)));
  return static_cast<bool>(stream);
}

}  // namespace

FileMapping& FileMapping::operator=(FileMapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

FileMapping::~FileMapping() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

Result<FileMapping> FileMapping::map(int fd, uint64_t offset, uint64_t size, bool is_writable) {
  FileMapping mapping;
  if (size == 0) return mapping;
  const int access = is_writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* data = ::mmap(nullptr, size, access, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) return Fault{Errc::kFailed, "it cannot be mapped: " + system_error(errno)};
  mapping.data_ = static_cast<std::byte*>(data);
  mapping.size_ = size;
  if (is_writable) ::madvise(data, size, MADV_DONTFORK);
  return mapping;
}

void FileMapping::make_pages() const {
  // Not of all at once: the kernel holds a lock that other threads' mmap() waits for.
  constexpr uint64_t kStepBytes = 1 << 16;
  for (uint64_t place = 0; place < size_; place += kStepBytes)
    if (::madvise(data_ + place, std::min(kStepBytes, size_ - place), MADV_POPULATE_WRITE) != 0) return;
}

Result<FileMapping> FileMapping::page_of_process() {
  FileMapping mapping;
  void* data = ::mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return Fault{Errc::kFailed, "no memory: " + system_error(errno)};
  mapping.data_ = static_cast<std::byte*>(data);
  mapping.size_ = kPageBytes;
  if (::madvise(data, kPageBytes, MADV_WIPEONFORK) != 0)
    return Fault{Errc::kFailed, "MADV_WIPEONFORK, of Linux 4.14: " + system_error(errno)};
  return mapping;
}

std::string file_name(RankOfJob rank) {
  return "visits.rank" + std::to_string(rank.rank) + "of" + std::to_string(rank.world_size);
}

Result<std::unique_ptr<VisitRecorder>> VisitRecorder::open(const std::string& path, RankOfJob rank,
                                                           const Session& session) {
  FileDescriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  const auto refused = [&](const std::string& reason) {
    return Fault{Errc::kFailed, "the visits cannot be recorded in " + path + ": " + reason};
  };
  if (!file) return refused(system_error(errno));
  if (auto locked = lock_file(file.get()); !locked) return refused(locked.error().message);
  struct stat facts = {};
  if (::fstat(file.get(), &facts) != 0) return refused(system_error(errno));
  std::unique_ptr<VisitRecorder> recorder(new VisitRecorder(path, std::move(file)));
  const auto header = header_of(rank);
  if (facts.st_size == 0) {
    const auto written = ::pwrite(recorder->file_.get(), header.data(), header.size(), 0);
    if (written != static_cast<ssize_t>(header.size())) return refused(system_error(errno));
    recorder->end_ = header.size();
    recorder->chain_ = 0;
  } else {
    // Only a process's death right after it had created the file leaves less than a header.
    auto existing = VisitFile::open(path);
    if (!existing) return existing.error();
    if (existing.value().rank() != rank)
      return refused("it is of rank " + std::to_string(existing.value().rank().rank) + " of " +
                     std::to_string(existing.value().rank().world_size));
    const auto read = existing.value().read([&](const RecordView& record, uint64_t) -> Result<void> {
      if (record.kind == RecordKind::kSession) return {};
      ByteReader reader(record.body);
      recorder->last_epoch_ = reader.read<uint32_t>();
      recorder->has_last_ended_ = record.kind == RecordKind::kEpochEnd;
      return {};
    });
    if (!read) return read.error();
    if (existing.value().is_damaged_inside())
      return refused("it is damaged at byte " + std::to_string(existing.value().end()) +
                     ", and records follow that would be lost; move the file away");
    recorder->end_ = existing.value().end();
    recorder->chain_ = existing.value().chain();
    if (const uint64_t torn = existing.value().torn_bytes(); torn > 0)
      recorder->repair_ = path + " ended with an unfinished record of " + std::to_string(torn) +
                          " bytes, as the death of a machine leaves it; the bytes were removed, and the records "
                          "before them are kept";
    // The reader's descriptor, which is closed now, has taken the lock along: POSIX's rule.
    existing = Fault{Errc::kClosed, ""};
    if (auto locked = lock_file(recorder->file_.get()); !locked) return refused(locked.error().message);
    // What follows is zero again.
    if (::ftruncate(recorder->file_.get(), static_cast<off_t>(recorder->end_)) != 0)
      return refused(system_error(errno));
  }
  auto page = FileMapping::page_of_process();
  if (!page) return refused(page.error().message);
  recorder->is_owner_ = std::move(page).value();
  *recorder->is_owner_.data() = std::byte{1};  // from here on close() cuts the file
  if (auto appended = recorder->append_session(session); !appended) return appended.error();
  return recorder;
}

VisitRecorder::~VisitRecorder() { close(); }

void VisitRecorder::close() {
  if (!file_) return;
  if (is_owner()) {
    window_ = std::make_shared<FileMapping>();
    static_cast<void>(!::ftruncate(file_.get(), static_cast<off_t>(end_)));  // zeros at the end do no harm
  }
  file_.reset();
}

Fault VisitRecorder::refused(const std::string& what) const {
  return {Errc::kFailed, "the visits cannot be recorded in " + path_ + ": " + what};
}

Result<std::byte*> VisitRecorder::room_for(uint64_t body_bytes) {
  const uint64_t needed = record_bytes(body_bytes) + kSlackBytes;
  if (!is_owner()) return refused("another process, from which this one was forked, records into it");
  if (!file_) return refused("the record is closed");
  if (end_ < window_offset_ || end_ + needed > window_offset_ + window_->size()) {
    const uint64_t offset = end_ / kPageBytes * kPageBytes;
    const uint64_t size = align_up(std::max(kWindowBytes, end_ - offset + needed), kPageBytes);
    const int error = ::posix_fallocate(file_.get(), static_cast<off_t>(offset), static_cast<off_t>(size));
    if (error != 0)
      return refused("it cannot grow: " + system_error(error) +
                     "; free space, or record no visits by record_visits(None)");
    auto mapping = FileMapping::map(file_.get(), offset, size, true);
    if (!mapping) return refused(mapping.error().message);
    window_ = std::make_shared<FileMapping>(std::move(mapping).value());
    window_offset_ = offset;
    make_pages_ahead(window_);
  }
  return window_->data() + (end_ - window_offset_);
}

void VisitRecorder::finish(std::byte* record, uint64_t body_bytes, RecordKind kind, uint8_t width, uint16_t flags) {
  const auto length = static_cast<uint32_t>(body_bytes);
  std::memcpy(record + 8, &length, sizeof length);
  record[12] = static_cast<std::byte>(kind);
  record[13] = static_cast<std::byte>(width);
  std::memcpy(record + 14, &flags, sizeof flags);
  const uint64_t padding = record_bytes(body_bytes) - kFrameBytes - body_bytes;
  std::memset(record + kFrameBytes + body_bytes, 0, padding + kSlackBytes);
  chain_ = chain_after(chain_, {record + 8, kFrameBytes - 8 + body_bytes});
  // release: everything before it is in the page cache when a reader, after this process's death, finds the chain.
  std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(record)).store(chain_, std::memory_order_release);
  end_ += record_bytes(body_bytes);
}

Result<void> VisitRecorder::append(uint32_t epoch, int64_t step, std::span<const int64_t> indices, uint16_t flags) {
  if (indices.size() > kIndicesMax) return refused("a batch has " + std::to_string(indices.size()) + " samples");
  const Packing packing = Packing::of(indices);
  const uint64_t body_bytes = kBatchBytes + indices.size() * packing.width;
  auto room = room_for(body_bytes);
  if (!room) return room.error();
  std::byte* const body = room.value() + kFrameBytes;
  const auto count = static_cast<uint32_t>(indices.size());
  std::memcpy(body, &epoch, sizeof epoch);
  std::memcpy(body + 4, &count, sizeof count);
  std::memcpy(body + 8, &step, sizeof step);
  std::memcpy(body + 16, &packing.base, sizeof packing.base);
  packing.write(indices, body + kBatchBytes);
  finish(room.value(), body_bytes, RecordKind::kBatch, packing.width, flags);
  last_epoch_ = epoch;
  has_last_ended_ = false;
  return {};
}

Result<void> VisitRecorder::append_run(uint32_t epoch, int64_t step, int64_t first, uint32_t count) {
  return append_plain(epoch, step, first, count, 0);
}

Result<void> VisitRecorder::append_unknown(uint32_t epoch, int64_t step, uint32_t count) {
  return append_plain(epoch, step, 0, count, kUnknownIndices);
}

Result<void> VisitRecorder::append_plain(uint32_t epoch, int64_t step, int64_t base, uint32_t count, uint16_t flags) {
  auto room = room_for(kBatchBytes);
  if (!room) return room.error();
  std::byte* const body = room.value() + kFrameBytes;
  std::memcpy(body, &epoch, sizeof epoch);
  std::memcpy(body + 4, &count, sizeof count);
  std::memcpy(body + 8, &step, sizeof step);
  std::memcpy(body + 16, &base, sizeof base);
  finish(room.value(), kBatchBytes, RecordKind::kBatch, 0, flags);
  last_epoch_ = epoch;
  has_last_ended_ = false;
  return {};
}

Result<void> VisitRecorder::end_epoch(uint32_t epoch, int64_t steps) {
  constexpr uint64_t kBodyBytes = 16;
  auto room = room_for(kBodyBytes);
  if (!room) return room.error();
  std::byte* const body = room.value() + kFrameBytes;
  const uint32_t none = 0;
  std::memcpy(body, &epoch, sizeof epoch);
  std::memcpy(body + 4, &none, sizeof none);
  std::memcpy(body + 8, &steps, sizeof steps);
  finish(room.value(), kBodyBytes, RecordKind::kEpochEnd, 0, 0);
  last_epoch_ = epoch;
  has_last_ended_ = true;
  return {};
}

Result<void> VisitRecorder::append_session(const Session& session) {
  const auto bytes = body_of(session);
  auto room = room_for(bytes.size());
  if (!room) return room.error();
  std::memcpy(room.value() + kFrameBytes, bytes.data(), bytes.size());
  finish(room.value(), bytes.size(), RecordKind::kSession, 0, session.flags);
  return {};
}

Result<VisitFile> VisitFile::open(const std::string& path) {
  FileDescriptor descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat facts = {};
  if (!descriptor || ::fstat(descriptor.get(), &facts) != 0)
    return Fault{Errc::kFailed, path + " cannot be read: " + system_error(errno)};
  auto mapping = FileMapping::map(descriptor.get(), 0, static_cast<uint64_t>(facts.st_size), false);
  if (!mapping) return named(path, mapping.error(), "");
  VisitFile file;
  file.path_ = path;
  file.mapping_ = std::move(mapping).value();
  const uint64_t header_bytes = std::min<uint64_t>(kHeaderBytes, file.mapping_.size());
  auto rank = parse_header({file.mapping_.data(), header_bytes});
  if (!rank) return named(path, rank.error(), "; name a folder that loader.record_visits() has written");
  file.rank_ = rank.value();
  return file;
}

bool VisitFile::is_record(uint64_t offset, uint64_t chain_before) const {
  if (offset + kFrameBytes > mapping_.size()) return false;
  const std::byte* record = mapping_.data() + offset;
  uint64_t chain = 0;
  uint32_t body_bytes = 0;
  std::memcpy(&chain, record, sizeof chain);
  std::memcpy(&body_bytes, record + 8, sizeof body_bytes);
  if (chain == 0 || record_bytes(body_bytes) > mapping_.size() - offset) return false;
  return chain == chain_after(chain_before, {record + 8, kFrameBytes - 8 + body_bytes});
}

bool VisitFile::is_followed(uint64_t offset, uint64_t last) const {
  uint64_t chain = 0;
  uint32_t body_bytes = 0;
  std::memcpy(&chain, mapping_.data() + offset, sizeof chain);
  std::memcpy(&body_bytes, mapping_.data() + offset + 8, sizeof body_bytes);
  return record_bytes(body_bytes) < last - offset && is_record(offset + record_bytes(body_bytes), chain);
}

bool VisitFile::is_at_end(uint64_t last_offset, uint64_t end, uint64_t chain) const {
  if (end < kHeaderBytes || end > mapping_.size() || last_offset + kFrameBytes > end) return false;
  uint64_t stated = 0;
  if (last_offset == 0) return chain == 0 && end == kHeaderBytes && !is_record(end, chain);
  std::memcpy(&stated, mapping_.data() + last_offset, sizeof stated);
  return stated == chain && last_offset + record_bytes(record_at(last_offset).body.size()) == end &&
         !is_record(end, chain);
}

RecordView VisitFile::record_at(uint64_t offset) const {
  const std::byte* record = mapping_.data() + offset;
  uint32_t body_bytes = 0;
  RecordView view;
  std::memcpy(&body_bytes, record + 8, sizeof body_bytes);
  view.kind = static_cast<RecordKind>(record[12]);
  view.width = static_cast<uint8_t>(record[13]);
  std::memcpy(&view.flags, record + 14, sizeof view.flags);
  view.body = {record + kFrameBytes, body_bytes};
  view.leaf = {record + kLeafOffset, kFrameBytes - kLeafOffset + body_bytes};
  return view;
}

Result<void> VisitFile::read(const Visitor& visit) {
  uint64_t offset = kHeaderBytes;
  chain_ = 0;
  last_offset_ = 0;
  while (is_record(offset, chain_)) {
    const RecordView record = record_at(offset);
    if (auto visited = visit(record, offset); !visited) return named(path_, visited.error(), "");
    std::memcpy(&chain_, mapping_.data() + offset, sizeof chain_);
    last_offset_ = offset;
    offset += record_bytes(record.body.size());
  }
  end_ = std::min(offset, mapping_.size());
  uint64_t last = mapping_.size();
  while (last > end_ && mapping_.data()[last - 1] == std::byte{0}) --last;
  torn_bytes_ = last - end_;
  is_damaged_inside_ = false;
  // More than an unfinished record has: whether records follow is not looked for at this size.
  if (torn_bytes_ > kTornBytesMax) is_damaged_inside_ = true;
  if (torn_bytes_ >= kFrameBytes && !is_damaged_inside_) {
    uint64_t chain = 0;
    uint32_t body_bytes = 0;
    std::memcpy(&chain, mapping_.data() + end_, sizeof chain);
    std::memcpy(&body_bytes, mapping_.data() + end_ + 8, sizeof body_bytes);
    // One of the damaged record's fields is changed: its bytes still give the next chain, or its chain or its length
    // do.
    const uint64_t next = end_ + record_bytes(body_bytes);
    if (next + kFrameBytes <= last) {
      const uint64_t computed = chain_after(chain_, {mapping_.data() + end_ + 8, kFrameBytes - 8 + body_bytes});
      is_damaged_inside_ = is_record(next, chain) || is_record(next, computed);
    }
    for (uint64_t place = end_ + 8; !is_damaged_inside_ && place + kFrameBytes <= last; place += 8)
      is_damaged_inside_ = is_record(place, chain) || is_followed(place, last);
  }
  return {};
}

Result<VisitTree> make_tree(VisitFile& file) {
  VisitTree made;
  const auto read = file.read([&](const RecordView& record, uint64_t offset) -> Result<void> {
    if (record.kind == RecordKind::kSession) made.session_offsets.push_back(offset);
    if (record.kind != RecordKind::kBatch) return {};
    if (made.tree.size() % MerkleTree::kBlockLeaves == 0) made.block_offsets.push_back(offset);
    made.tree.append(leaf_hash(record.leaf));
    return {};
  });
  if (!read) return read.error();
  made.root = made.tree.root();
  made.leaf_count = made.tree.size();
  return made;
}

Result<void> store_tree(const VisitFile& file, const VisitTree& tree) {
  ContentDigest digest;
  ByteWriter rest;
  for (const auto& level : tree.tree.levels()) rest.write_bytes(std::as_bytes(std::span(level)));
  rest.write_bytes(std::as_bytes(std::span(tree.tree.tail())));
  rest.write_bytes(std::as_bytes(std::span(tree.block_offsets)));
  digest.add(rest.bytes());
  TreeHeader header = {};
  std::memcpy(header.magic, kTreeMagic.data(), sizeof header.magic);
  header.version = kTreeVersion;
  header.session_count = static_cast<uint32_t>(tree.session_offsets.size());
  header.leaf_count = tree.tree.size();
  header.end = file.end();
  header.last_offset = file.last_offset();
  header.chain = file.chain();
  header.root = tree.root;
  header.rest_digest = digest.value();
  header.header_digest = digest_of(header, tree.session_offsets);
  // A reader sees the old tree or the new one.
  const std::string path = tree_path(file);
  const std::string draft = path + "." + std::to_string(::getpid());
  {
    std::ofstream stream(draft, std::ios::binary | std::ios::trunc);
    const auto write = [&](std::span<const std::byte> bytes) {
      stream.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    };
    write(std::as_bytes(std::span(&header, 1)));
    write(std::as_bytes(std::span(tree.session_offsets)));
    write(rest.bytes());
    stream.close();
    if (stream && ::rename(draft.c_str(), path.c_str()) == 0) return {};
  }
  const std::string reason = system_error(errno);
  ::unlink(draft.c_str());
  return Fault{Errc::kFailed, path + " cannot be written: " + reason};
}

Result<VisitTree> load_tree(const VisitFile& file, bool root_only) {
  std::ifstream stream(tree_path(file), std::ios::binary);
  TreeHeader header = {};
  stream.read(reinterpret_cast<char*>(&header), sizeof header);
  const bool is_tree = stream && std::string_view(header.magic, sizeof header.magic) == kTreeMagic &&
                       header.version == kTreeVersion && header.session_count <= header.end / kFrameBytes;
  VisitTree loaded;
  if (!is_tree || !read_all(stream, loaded.session_offsets, header.session_count) ||
      header.header_digest != digest_of(header, loaded.session_offsets) ||
      !file.is_at_end(header.last_offset, header.end, header.chain))
    return no_tree(file);
  loaded.root = header.root;
  if (root_only) {
    loaded.leaf_count = header.leaf_count;
    return loaded;
  }
  std::vector<std::vector<Hash>> levels;
  std::vector<Hash> tail;
  ContentDigest digest;
  ByteWriter rest;
  bool is_whole = header.leaf_count <= header.end / record_bytes(kBatchBytes);
  for (uint64_t count = header.leaf_count / MerkleTree::kBlockLeaves; is_whole && count > 0; count /= 2) {
    is_whole = read_all(stream, levels.emplace_back(), count);
    if (is_whole) rest.write_bytes(std::as_bytes(std::span(levels.back())));
  }
  is_whole = is_whole && read_all(stream, tail, header.leaf_count % MerkleTree::kBlockLeaves);
  const uint64_t block_count = (header.leaf_count + MerkleTree::kBlockLeaves - 1) / MerkleTree::kBlockLeaves;
  is_whole = is_whole && read_all(stream, loaded.block_offsets, block_count);
  if (!is_whole) return no_tree(file);
  rest.write_bytes(std::as_bytes(std::span(tail)));
  rest.write_bytes(std::as_bytes(std::span(loaded.block_offsets)));
  digest.add(rest.bytes());
  auto tree = MerkleTree::of_parts(header.leaf_count, std::move(levels), std::move(tail));
  if (!tree || digest.value() != header.rest_digest || tree->root() != header.root) return no_tree(file);
  loaded.tree = std::move(*tree);
  loaded.leaf_count = header.leaf_count;
  return loaded;
}

uint64_t offset_of(const VisitFile& file, const VisitTree& tree, uint64_t index) {
  uint64_t offset = tree.block_offsets.at(index / MerkleTree::kBlockLeaves);
  for (uint64_t left = index % MerkleTree::kBlockLeaves;;) {
    const RecordView record = file.record_at(offset);
    if (record.kind == RecordKind::kBatch && left-- == 0) return offset;
    offset += record_bytes(record.body.size());
  }
}

MerkleTree::LeafReader leaf_reader(const VisitFile& file, const VisitTree& tree) {
  return [&file, &tree](uint64_t index) { return leaf_hash(file.record_at(offset_of(file, tree, index)).leaf); };
}

}  // namespace penstock::visits
