// SPDX-License-Identifier: Apache-2.0
#include "worker/slab_writer.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/result.h"

namespace penstock::worker {

using wire::kPayloadAlignment;
using wire::TensorEntry;

namespace {

// The part of a slab that a tensor pins during its lifetime.
struct SlabPin {
  std::shared_ptr<shm::Arena> arena;  // shared with the pool; the last pin of an old arena unmaps it
  uint32_t slab_index;
};

void drop_pin(void* context) {
  const std::unique_ptr<SlabPin> pin(static_cast<SlabPin*>(context));
  pin->arena->unpin(pin->slab_index);
}

uint64_t end_of(const wire::Frame& frame) {
  uint64_t end = 0;
  for (const TensorEntry& entry : frame.tensors) {
    if (entry.encoding != wire::Encoding::kShared) end = std::max(end, entry.offset + entry.bytes);
  }
  return align_up(end, kPayloadAlignment);
}

bool is_shared_too_often(const wire::Frame& frame) {
  uint64_t bytes = 0;
  for (const TensorEntry& entry : frame.tensors) bytes += entry.bytes;
  return bytes / wire::kWholeFactorMax > frame.payload_bytes;
}

// Named tensors were removed in torch 2.15.
template <typename Tensor>
bool has_names(const Tensor& tensor) {
  if constexpr (requires { tensor.has_names(); }) return tensor.has_names();
  return false;
}

}  // namespace

bool is_plain_tensor(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.device().is_cpu()) return false;
  if (tensor.is_quantized() || tensor.is_nested() || tensor.requires_grad() || has_names(tensor) || tensor.is_conj() ||
      tensor.is_neg() || tensor._is_zerotensor()) {
    return false;
  }
  if (!tensor.has_storage() || tensor.unsafeGetTensorImpl()->is_python_dispatch() || tensor.is_sparse()) return false;
  return wire::dtype_bytes(static_cast<wire::DTypeCode>(tensor.scalar_type())) > 0 &&
         tensor.dim() <= static_cast<int64_t>(wire::kDimCountMax);
}

TensorEntry describe_tensor(const at::Tensor& tensor) {
  TensorEntry entry{.dtype = static_cast<wire::DTypeCode>(tensor.scalar_type()),
                    .shape = tensor.sizes().vec(),
                    .strides = tensor.strides().vec()};
  const auto bytes = wire::span_bytes(entry.dtype, entry.shape, entry.strides);
  PENSTOCK_ASSERT(bytes, "a tensor that is not plain was added to the table");
  entry.bytes = bytes.value();
  return entry;
}

void SlabWriter::begin() {
  clock_.begin(clock_now());
  MutexLock lock(mutex_);
  if (region_)
    region_->arena->cancel(region_->slab_index);  // tensors on it that are still alive, if any, keep the slab pinned
  region_.reset();
  used_bytes_ = 0;
  has_no_memory_ = false;
}

Result<void> SlabWriter::take_slab() {
  if (region_) return {};
  auto region = pool_.acquire(0);
  if (!region) return region.error();
  region_ = std::move(region).value();
  used_bytes_ = 0;
  return {};
}

std::byte* SlabWriter::allocate(uint64_t bytes) {
  if (!take_slab()) return nullptr;
  const uint64_t start = align_up(used_bytes_, kPayloadAlignment);
  if (start > region_->capacity() || bytes > region_->capacity() - start) return nullptr;
  if (!region_->arena->reserve(region_->slab_index, start + bytes)) return nullptr;
  used_bytes_ = start + bytes;
  return region_->data() + start;
}

at::Tensor SlabWriter::empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  const uint64_t bytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
  MutexLock lock(mutex_);
  if (has_no_memory_) return {};
  if (used_bytes_ == 0 && region_ && bytes > region_->capacity()) {  // nothing in it yet: take a larger one
    region_->arena->cancel(region_->slab_index);
    region_.reset();
  }
  if (!region_) {
    auto region = pool_.acquire(bytes);
    if (!region) {
      has_no_memory_ = true;
      return {};
    }
    region_ = std::move(region).value();
    used_bytes_ = 0;
  }
  return empty_in_slab(sizes, dtype);
}

at::Tensor SlabWriter::empty_if_free(at::IntArrayRef sizes, at::ScalarType dtype) {
  MutexLock lock(mutex_);
  if (has_no_memory_) return {};
  if (!region_) {
    region_ = pool_.acquire_if_free(c10::multiply_integers(sizes) * c10::elementSize(dtype));
    used_bytes_ = 0;
  }
  return region_ ? empty_in_slab(sizes, dtype) : at::Tensor();
}

bool SlabWriter::holds(const at::Storage& storage) {
  MutexLock lock(mutex_);
  const auto* data = static_cast<const std::byte*>(storage.data());
  return region_ && data >= region_->data() && data + storage.nbytes() <= region_->data() + used_bytes_;
}

at::Tensor SlabWriter::empty_in_slab(at::IntArrayRef sizes, at::ScalarType dtype) {
  const uint64_t bytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
  std::byte* data = allocate(bytes);
  if (data == nullptr) return {};
  region_->arena->pin(region_->slab_index);
  auto pin = std::make_unique<SlabPin>(SlabPin{.arena = region_->arena, .slab_index = region_->slab_index});
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       at::DataPtr(data, pin.release(), &drop_pin, at::kCPU),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                         c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         caffe2::TypeMeta::fromScalarType(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

SlabWriter::Placement SlabWriter::place(const BatchContent& content) {
  Placement placement;
  placement.frame.nest = content.nest;
  placement.frame.boundary_keys.assign(content.boundary_keys.begin(), content.boundary_keys.end());
  for (size_t index = 0; index < content.tensors.size(); ++index) {
    const at::Tensor& tensor = content.tensors[index];
    TensorEntry entry = describe_tensor(tensor);
    const bool has_bytes = entry.bytes > 0 && !tensor.is_meta();  // a meta tensor is a withheld leaf
    const auto* source = static_cast<const std::byte*>(has_bytes ? tensor.const_data_ptr() : nullptr);
    const std::byte* base = region_ ? region_->data() : nullptr;
    const bool is_in_place = base != nullptr && source >= base && source + entry.bytes <= base + used_bytes_ &&
                             static_cast<uint64_t>(source - base) % kPayloadAlignment == 0;
    if (is_in_place) entry.offset = static_cast<uint64_t>(source - base);
    if (index < content.shared.storage_of_leaf.size() && content.shared.storage_of_leaf[index]) {
      entry.encoding = wire::Encoding::kShared;
      entry.file_index = *content.shared.storage_of_leaf[index];
      entry.offset = static_cast<uint64_t>(source - static_cast<const std::byte*>(tensor.storage().data()));
    }
    placement.frame.tensors.push_back(std::move(entry));
    placement.sources.push_back(source);
    placement.is_in_place.push_back(is_in_place);
  }
  return placement;
}

Result<SealedBatch> SlabWriter::seal(const BatchContent& content) {
  MutexLock lock(mutex_);
  auto sealed = seal_content(content);
  if (sealed) sealed.value().shared = content.shared.storages;
  return sealed;
}

Result<SealedBatch> SlabWriter::seal_content(const BatchContent& content) {
  if (!content.withheld.empty() || !content.forms.empty()) return seal_in_part(content);
  if (!has_no_memory_) {
    if (auto taken = take_slab(); !taken) {
      if (taken.error().code != Errc::kNoMemory) return taken.error();
      has_no_memory_ = true;
    }
  }
  Placement placement = place(content);
  for (size_t index = 0; index < placement.sources.size(); ++index) {
    TensorEntry& entry = placement.frame.tensors[index];
    if (placement.is_in_place[index] || entry.bytes == 0 || entry.encoding == wire::Encoding::kShared) continue;
    std::byte* target = has_no_memory_ ? nullptr : allocate(entry.bytes);
    if (target == nullptr) return seal_elsewhere(std::move(placement));
    std::memcpy(target, placement.sources[index], entry.bytes);
    entry.offset = static_cast<uint64_t>(target - region_->data());
  }
  placement.frame.payload_bytes = end_of(placement.frame);
  if (bounds_sharing_ && is_shared_too_often(placement.frame)) return seal_elsewhere(std::move(placement));
  const std::vector<std::byte> record = wire::write_frame(placement.frame);
  std::byte* target = has_no_memory_ ? nullptr : allocate(record.size());
  if (target == nullptr) return seal_elsewhere(std::move(placement));
  std::memcpy(target, record.data(), record.size());
  SealedBatch sealed{.region = *region_,
                     .record_offset = static_cast<uint64_t>(target - region_->data()),
                     .record_bytes = static_cast<uint32_t>(record.size()),
                     .record = {},
                     .payload = {}};
  region_.reset();
  used_bytes_ = 0;
  return sealed;
}

Result<SealedBatch> SlabWriter::seal_in_part(const BatchContent& content) {
  Placement placement = place(content);
  placement.forms = content.forms;
  for (const uint32_t leaf : content.withheld) {
    TensorEntry& entry = placement.frame.tensors[leaf];
    entry.encoding = wire::Encoding::kWithheld;
    entry.bytes = 0;
  }
  for (size_t index = 0; index < content.forms.size(); ++index) {
    if (!content.forms[index]) continue;
    placement.frame.tensors[index].encoding = content.forms[index]->encoding;
    placement.frame.tensors[index].bytes = content.forms[index]->bytes;
  }
  return seal_elsewhere(std::move(placement));
}

void SlabWriter::write_tensor(const Placement& placement, size_t index, std::byte* payload) {
  const TensorEntry& entry = placement.frame.tensors[index];
  if (entry.bytes == 0 || entry.encoding == wire::Encoding::kShared) return;
  std::byte* const target = payload + entry.offset;
  if (!wire::is_narrow(entry.encoding)) {
    std::memcpy(target, placement.sources[index], entry.bytes);
    return;
  }
  TensorEntry plain = entry;
  plain.encoding = wire::Encoding::kPlain;
  plain.bytes = wire::plain_bytes(plain);
  wire::write_narrow(*placement.forms[index], plain, {placement.sources[index], plain.bytes}, {target, entry.bytes});
}

// The batch does not fit its first slab: everything is copied to a slab that is large enough.
Result<SealedBatch> SlabWriter::seal_elsewhere(Placement placement) {
  uint64_t offset = 0;
  for (TensorEntry& entry : placement.frame.tensors) {
    if (entry.encoding == wire::Encoding::kWithheld) {
      entry.offset = 0;
      continue;
    }
    if (entry.encoding == wire::Encoding::kShared) continue;
    entry.offset = offset;
    offset = align_up(offset + entry.bytes, kPayloadAlignment);
  }
  placement.frame.payload_bytes = offset;
  const std::vector<std::byte> record = wire::write_frame(placement.frame);
  auto acquired = pool_.acquire_now(offset + record.size());
  if (!acquired) {
    if (acquired.error().code == Errc::kClosed) return acquired.error();
    return seal_inline(placement);
  }
  shm::SlabRegion region = std::move(acquired).value();
  for (size_t index = 0; index < placement.sources.size(); ++index) write_tensor(placement, index, region.data());
  std::memcpy(region.data() + offset, record.data(), record.size());
  if (region_) region_->arena->cancel(region_->slab_index);
  region_.reset();
  used_bytes_ = 0;
  return SealedBatch{.region = std::move(region),
                     .record_offset = offset,
                     .record_bytes = static_cast<uint32_t>(record.size()),
                     .record = {},
                     .payload = {}};
}

SealedBatch SlabWriter::seal_inline(const Placement& placement) {
  SealedBatch sealed;
  sealed.record = wire::write_frame(placement.frame);
  sealed.payload.resize(placement.frame.payload_bytes);
  for (size_t index = 0; index < placement.sources.size(); ++index)
    write_tensor(placement, index, sealed.payload.data());
  sealed.record_bytes = static_cast<uint32_t>(sealed.record.size());
  return sealed;
}

SlabBatch::SlabBatch(SealedBatch batch) : batch_(std::move(batch)) {
  if (batch_.region) {
    hold({batch_.region->data(), batch_.record_offset + batch_.record_bytes}, batch_.record_bytes);
    return;
  }
  // Without a slab the record follows in the same buffer.
  batch_.payload.resize(align_up(batch_.payload.size(), wire::kPayloadAlignment));
  batch_.payload.insert(batch_.payload.end(), batch_.record.begin(), batch_.record.end());
  hold(batch_.payload, batch_.record_bytes);
}

void SlabBatch::note_handed_over() {
  PENSTOCK_ASSERT(batch_.region && !is_handed_over_, "a slab can be sent only once");
  batch_.region->arena->pin(batch_.region->slab_index);
  is_handed_over_ = true;
}

SlabBatch::~SlabBatch() {
  if (!batch_.region) return;
  if (is_handed_over_) {
    batch_.region->arena->unpin(batch_.region->slab_index);
  } else {
    batch_.region->arena->cancel(batch_.region->slab_index);
  }
}

}  // namespace penstock::worker
