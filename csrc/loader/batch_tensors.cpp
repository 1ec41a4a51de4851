// SPDX-License-Identifier: Apache-2.0
#include "loader/batch_tensors.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/MapAllocator.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "base/bytes.h"
#include "device/cuda_device.h"
#include "loader/batch_memory.h"
#include "wire/narrow.h"

namespace penstock::loader {
namespace {

using wire::dtype_bytes;
using wire::TensorEntry;

constexpr bool has_size(c10::ScalarType type, uint32_t bytes) {
  return dtype_bytes(static_cast<wire::DTypeCode>(type)) == bytes;
}
static_assert(has_size(c10::ScalarType::Byte, 1) && has_size(c10::ScalarType::Long, 8) &&
              has_size(c10::ScalarType::Float, 4) && has_size(c10::ScalarType::Bool, 1) &&
              has_size(c10::ScalarType::BFloat16, 2) && has_size(c10::ScalarType::ComplexDouble, 16) &&
              has_size(c10::ScalarType::Float8_e4m3fnuz, 1) && has_size(c10::ScalarType::UInt16, 2) &&
              has_size(c10::ScalarType::UInt64, 8));

void drop_lease(void* context) { c10::intrusive_ptr<SlabLease>::reclaim(static_cast<SlabLease*>(context)); }

at::Tensor make_tensor(const TensorEntry& entry, at::DataPtr data) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), wire::plain_bytes(entry),
                                                       std::move(data), /*allocator=*/nullptr, /*resizable=*/false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CPU),
      caffe2::TypeMeta::fromScalarType(static_cast<c10::ScalarType>(entry.dtype)));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(entry.shape, entry.strides);
  return tensor;
}

at::Tensor make_shared(const TensorEntry& entry, const c10::Storage& storage) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      caffe2::TypeMeta::fromScalarType(static_cast<c10::ScalarType>(entry.dtype)));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(entry.shape, entry.strides,
                                                      static_cast<int64_t>(entry.offset / dtype_bytes(entry.dtype)));
  return tensor;
}

// Maps a file as torch maps the files from its queues, so that torch's sharing recognises the storage as shared.
c10::Storage map_file(FileDescriptor fd, uint64_t bytes) {
  constexpr int kFlags = at::ALLOCATOR_MAPPED_SHAREDMEM | at::ALLOCATOR_MAPPED_NOCREATE | at::ALLOCATOR_MAPPED_KEEPFD |
                         at::ALLOCATOR_MAPPED_FROMFD;
  auto data = at::MapAllocator::makeDataPtr(at::WITH_FD, "", fd.release(), kFlags, bytes, nullptr);
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data),
                                               /*allocator=*/nullptr, /*resizable=*/false);
}

void drop_storage(void* context) { const std::unique_ptr<c10::Storage> storage(static_cast<c10::Storage*>(context)); }

at::Tensor make_meta(const TensorEntry& entry) {
  const auto options = at::TensorOptions().dtype(static_cast<c10::ScalarType>(entry.dtype)).device(at::kMeta);
  return at::empty_strided(entry.shape, entry.strides, options);
}

at::Tensor copy_to_own_memory(const TensorEntry& entry, std::span<const std::byte> bytes, bool is_pinned = false) {
  const auto accelerator = is_pinned ? at::getAccelerator() : std::nullopt;
  c10::Allocator* const allocator = accelerator ? at::getHostAllocator(*accelerator) : c10::GetCPUAllocator();
  at::DataPtr data = allocator->allocate(entry.bytes);
  if (!bytes.empty()) std::memcpy(data.get(), bytes.data(), bytes.size());
  return make_tensor(entry, std::move(data));
}

// `narrow` must have been checked.
at::Tensor widen_to_own_memory(const TensorEntry& entry, std::span<const std::byte> narrow) {
  const uint64_t own_bytes = wire::plain_bytes(entry);
  at::DataPtr data = c10::GetCPUAllocator()->allocate(own_bytes);
  const std::span target(static_cast<std::byte*>(data.get()), own_bytes);
  const auto widened = wire::widen(entry, narrow, target);
  PENSTOCK_ASSERT(widened, widened.error().message);
  return make_tensor(entry, std::move(data));
}

// For bools of which some bytes are neither 0 nor 1.
at::Tensor make_bools_in_own_memory(const TensorEntry& entry, std::span<const std::byte> bytes) {
  at::Tensor tensor = copy_to_own_memory(entry, bytes);
  wire::make_bools({static_cast<std::byte*>(tensor.mutable_data_ptr()), entry.bytes});
  return tensor;
}

// Describes narrow bytes as a separate tensor.
TensorEntry entry_of_bytes(const TensorEntry& entry) {
  return {.dtype = wire::kDTypeUInt8,
          .offset = entry.offset,
          .bytes = entry.bytes,
          .shape = {static_cast<int64_t>(entry.bytes)},
          .strides = {1}};
}

}  // namespace

std::span<const std::byte> BatchTensors::bytes_of(const TensorEntry& entry) const {
  const std::byte* payload = lease_ ? lease_->data() : payload_.data();
  return {payload + entry.offset, entry.bytes};
}

std::optional<ContentDigest::Value> BatchTensors::content() const {
  ContentDigest digest;
  digest.add(record_.frame().nest);
  for (const TensorEntry& entry : record_.frame().tensors) {
    // The bytes between the elements of a tensor with gaps are arbitrary.
    if (entry.encoding != wire::Encoding::kPlain || wire::element_bytes(entry) != entry.bytes) return std::nullopt;
    digest.add(static_cast<uint64_t>(entry.dtype));
    digest.add(std::as_bytes(std::span(entry.shape)));
    digest.add(std::as_bytes(std::span(entry.strides)));
    digest.add(bytes_of(entry));
  }
  return digest.value();
}

void BatchTensors::find_nonstandard_bools() {
  for (size_t index = 0; index < record_.tensor_count(); ++index) {
    const TensorEntry& entry = record_.entry(index);
    const bool is_plain_bools = entry.dtype == wire::kDTypeBool && entry.encoding == wire::Encoding::kPlain;
    if (!is_plain_bools || wire::are_bools(bytes_of(entry))) continue;
    nonstandard_bools_.resize(record_.tensor_count());
    nonstandard_bools_[index] = true;
  }
}

const std::vector<at::Tensor>& BatchTensors::all() {
  tensors_.resize(record_.tensor_count());
  for (size_t index = 0; index < tensors_.size(); ++index) {
    if (!tensors_[index].defined()) tensors_[index] = make(index);
  }
  return tensors_;
}

at::Tensor BatchTensors::copy_source(size_t index) { return lease_ ? make(index) : all()[index]; }

at::Tensor BatchTensors::make(size_t index) {
  const TensorEntry& entry = record_.entry(index);
  if (entry.encoding == wire::Encoding::kWithheld) return make_meta(entry);
  if (entry.encoding == wire::Encoding::kShared) return make_shared(entry, storage_of(entry));
  if (widening(index) != nullptr) return widen_to_own_memory(entry, bytes_of(entry));
  if (wire::is_narrow(entry.encoding)) {
    PENSTOCK_ASSERT(wide_.size() == record_.tensor_count(), "a batch was not decompressed");
    return wide_[index];
  }
  if (!nonstandard_bools_.empty() && nonstandard_bools_[index]) return make_bools_in_own_memory(entry, bytes_of(entry));
  return make_plain(entry);
}

at::Tensor BatchTensors::make_plain(const TensorEntry& entry) {
  const auto bytes = bytes_of(entry);
  if (!lease_ || bytes.empty()) return copy_to_own_memory(entry, bytes);
  auto* data = const_cast<std::byte*>(bytes.data());
  auto share = lease_;
  return make_tensor(entry, at::DataPtr(data, share.release(), &drop_lease, at::kCPU));
}

const c10::Storage& BatchTensors::storage_of(const TensorEntry& entry) {
  PENSTOCK_ASSERT(entry.file_index < shared_files_.size(), "the shared files of a batch were not set");
  SharedFile& file = shared_files_[entry.file_index];
  if (!file.storage) file.storage = map_file(std::move(file.fd), file.bytes);
  return file.storage;
}

Result<void> BatchTensors::set_shared_files(std::vector<FileDescriptor> fds) {
  PENSTOCK_ASSERT(fds.size() == record_.frame().shared_file_count());
  shared_files_.resize(fds.size());
  for (size_t index = 0; index < fds.size(); ++index) {
    struct stat status {};
    if (::fstat(fds[index].get(), &status) == 0) shared_files_[index].bytes = static_cast<uint64_t>(status.st_size);
    shared_files_[index].fd = std::move(fds[index]);
  }
  for (const TensorEntry& entry : record_.frame().tensors) {
    if (entry.encoding != wire::Encoding::kShared) continue;
    const uint64_t bytes = shared_files_[entry.file_index].bytes;
    if (entry.offset > bytes || entry.bytes > bytes - entry.offset)
      return Fault{Errc::kMalformed,
                   "a tensor lies beyond the end of its file in shared memory of " + std::to_string(bytes) + " bytes"};
  }
  return {};
}

Result<void> BatchTensors::map_for_copy() {
  if (shared_files_.empty()) return {};
  tensors_.resize(record_.tensor_count());
  for (size_t index = 0; index < tensors_.size(); ++index) {
    const TensorEntry& entry = record_.entry(index);
    if (entry.encoding != wire::Encoding::kShared || tensors_[index].defined()) continue;
    try {
      auto whole = std::make_unique<c10::Storage>(storage_of(entry));
      auto* data = static_cast<std::byte*>(whole->mutable_data()) + entry.offset;
      tensors_[index] = make_tensor(entry, at::DataPtr(data, whole.release(), &drop_storage, at::kCPU));
    } catch (const c10::Error& error) {
      return Fault{Errc::kNoMemory,
                   std::string("mapping a tensor in shared memory failed: ") + error.what_without_backtrace()};
    }
  }
  return {};
}

void BatchTensors::copy_out() {
  if (!lease_) return;
  PENSTOCK_ASSERT(tensors_.empty(), "tensors on the slab were already returned");
  std::optional<device::RelaxedCapture> relaxed;  // torch may call the driver for pinned memory
  if (pins_copies_) relaxed.emplace();
  tensors_.resize(record_.tensor_count());
  for (size_t index = 0; index < tensors_.size(); ++index) {
    const TensorEntry& entry = record_.entry(index);
    PENSTOCK_ASSERT(!wire::is_narrow(entry.encoding), "batches of this machine are sent as they are");
    if (entry.encoding == wire::Encoding::kPlain)
      tensors_[index] = copy_to_own_memory(entry, bytes_of(entry), pins_copies_);
  }
  lease_.reset();
}

bool BatchTensors::is_whole_in_slab() const {
  const bool is_transient = record_.facts().is_transient;
  return lease_ && !is_transient && !wide_lease_ && shared_files_.empty() && nonstandard_bools_.empty() &&
         !record_.is_narrow();
}

Result<void> BatchTensors::widen(BatchMemory& memory) {
  uint64_t bytes = 0;
  for (const TensorEntry& entry : record_.frame().tensors) {
    if (wire::is_narrow(entry.encoding)) bytes += align_up(wire::plain_bytes(entry), wire::kPayloadAlignment);
  }
  if (bytes == 0) return {};
  auto slab = memory.take(bytes);  // bounded: the narrow bytes that arrived account for it
  if (slab) wide_lease_ = std::move(slab.value().lease);
  wide_.resize(record_.tensor_count());
  uint64_t offset = 0;
  for (size_t index = 0; index < record_.tensor_count(); ++index) {
    const TensorEntry& entry = record_.entry(index);
    if (!wire::is_narrow(entry.encoding)) continue;
    const uint64_t own_bytes = wire::plain_bytes(entry);
    at::DataPtr data;
    if (wide_lease_) {
      std::byte* const place = wide_lease_->data() + offset;
      auto share = wide_lease_;
      data = at::DataPtr(place, share.release(), &drop_lease, at::kCPU);
    } else {
      try {
        data = c10::GetCPUAllocator()->allocate(own_bytes);
      } catch (const std::exception& error) {
        return Fault{Errc::kNoMemory, "the trainer has insufficient memory for a tensor of " +
                                          std::to_string(own_bytes) +
                                          " bytes; use smaller batches or fewer in flight (prefetch_factor, "
                                          "prefetch_bytes)"};
      }
    }
    offset += align_up(own_bytes, wire::kPayloadAlignment);
    const std::span target(static_cast<std::byte*>(data.get()), own_bytes);
    if (auto widened = wire::widen(entry, bytes_of(entry), target); !widened) return widened;
    if (entry.dtype == wire::kDTypeBool && entry.encoding != wire::Encoding::kBits) wire::make_bools(target);
    wide_[index] = make_tensor(entry, std::move(data));
  }
  return {};
}

Result<void> BatchTensors::check_narrow() {
  if (!record_.is_narrow()) return {};
  std::vector<wire::Widening> widenings(record_.tensor_count());
  for (size_t index = 0; index < widenings.size(); ++index) {
    const TensorEntry& entry = record_.entry(index);
    if (!wire::is_narrow(entry.encoding)) continue;
    const auto checked = wire::check_narrow(entry, bytes_of(entry));
    if (!checked) return checked.error();
    widenings[index] = checked.value();
  }
  widenings_ = std::move(widenings);
  return {};
}

bool BatchTensors::try_keep_narrow() {
  PENSTOCK_ASSERT(!record_.is_narrow() || !widenings_.empty(), "compressed tensors were not checked");
  for (size_t index = 0; index < widenings_.size(); ++index) {
    const TensorEntry& entry = record_.entry(index);
    if (!wire::is_narrow(entry.encoding)) continue;
    if (widenings_[index].row_count > device::Device::kWidenedRowsMax) return false;
    if (entry.dtype == wire::kDTypeBool && !wire::widens_to_bools(widenings_[index], bytes_of(entry))) return false;
  }
  keeps_narrow_ = !widenings_.empty();
  return true;
}

const wire::Widening* BatchTensors::widening(size_t index) const {
  if (!keeps_narrow_ || !wire::is_narrow(widenings_[index].encoding)) return nullptr;
  return &widenings_[index];
}

std::vector<at::Tensor> BatchTensors::copy_sources() {
  if (!keeps_narrow_) return all();
  tensors_.resize(record_.tensor_count());
  std::vector<at::Tensor> sources;
  sources.reserve(tensors_.size());
  for (size_t index = 0; index < tensors_.size(); ++index) {
    if (widening(index) != nullptr) {
      sources.push_back(make_plain(entry_of_bytes(record_.entry(index))));
      continue;
    }
    if (!tensors_[index].defined()) tensors_[index] = make(index);
    sources.push_back(tensors_[index]);
  }
  return sources;
}

at::Tensor BatchTensors::meta(size_t index) const { return make_meta(record_.entry(index)); }

void BatchTensors::mark_held() {
  if (lease_) lease_->mark_held();
  if (wide_lease_) wide_lease_->mark_held();
}

void BatchTensors::set_stand_in(size_t index, at::Tensor tensor) {
  PENSTOCK_ASSERT(record_.is_withheld(index) && index < all().size());
  tensors_[index] = std::move(tensor);
}

void BatchTensors::replace(std::vector<at::Tensor> tensors) {
  PENSTOCK_ASSERT(tensors.size() == record_.tensor_count());
  tensors_ = std::move(tensors);
  lease_.reset();
  shared_files_.clear();
  wide_lease_.reset();
  wide_.clear();
  was_widened_on_device_ = std::exchange(keeps_narrow_, false);
}

}  // namespace penstock::loader
