// SPDX-License-Identifier: Apache-2.0
#include "dataset/collator.h"

#include <ATen/ops/copy.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "base/result.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace penstock::dataset {
namespace {

using Kind = Value::Kind;

std::string sizes_text(at::IntArrayRef sizes) {
  std::string text = "[";
  for (size_t index = 0; index < sizes.size(); ++index) text += (index > 0 ? ", " : "") + std::to_string(sizes[index]);
  return text + "]";
}

std::string path_text(const Collator::Path& path) {
  if (path.parent == nullptr) return "";
  const std::string step = path.key != nullptr ? path.key->describe() : std::to_string(path.index);
  return path_text(*path.parent) + "[" + step + "]";
}

[[noreturn]] void refuse(const std::string& text, const Collator::Path& path) {
  const std::string where = path_text(path);
  throw Error(ErrorKind::kValue, where.empty() ? text : text + "; it is part " + where + " of the samples");
}

void check_tensor(const at::Tensor& tensor, const Collator::Path& path) {
  if (!tensor.defined()) refuse("a sample contains an undefined tensor; define it", path);
  if (tensor.layout() != at::kStrided || !tensor.device().is_cpu() || tensor.is_quantized()) {
    refuse("a sample contains a tensor of " + std::string(toString(tensor.scalar_type())) + " on " +
               tensor.device().str() + "; it must be a dense CPU tensor",
           path);
  }
}

}  // namespace

void Collator::add(const Value& sample) {
  PENSTOCK_ASSERT(count_ < capacity_);
  if (!root_) root_ = begin(sample, {});
  add_row(*root_, sample, {});
  ++count_;
}

Collator::Column Collator::begin(const Value& first, const Path& path) {
  Column column{.kind = first.kind(), .rows = {}};
  const auto rows = static_cast<int64_t>(capacity_);
  switch (first.kind()) {
    case Kind::kTensor: {
      check_tensor(first.tensor(), path);
      std::vector<int64_t> sizes = {rows};
      sizes.insert(sizes.end(), first.tensor().sizes().begin(), first.tensor().sizes().end());
      column.rows = memory_.empty(sizes, first.tensor().scalar_type());
      break;
    }
    case Kind::kBoolean: column.rows = memory_.empty({rows}, at::kBool); break;
    case Kind::kInteger: column.rows = memory_.empty({rows}, at::kLong); break;
    case Kind::kNumber: column.rows = memory_.empty({rows}, at::kDouble); break;
    case Kind::kText:
    case Kind::kBytes: column.items.reserve(capacity_); break;
    case Kind::kList:
    case Kind::kTuple:
      for (const Value& item : first.items())
        column.parts.push_back(begin(item, {.parent = &path, .index = column.parts.size()}));
      break;
    case Kind::kDict:
      for (const Value::Entry& entry : first.entries()) {
        column.keys.push_back(entry.key);
        column.parts.push_back(begin(entry.value, {.parent = &path, .key = &entry.key}));
      }
      break;
    case Kind::kNone:
      refuse("default_collate: batch must contain tensors, numbers, text, dicts or lists; found none", path);
  }
  if (column.rows.defined()) column.data = column.rows.mutable_data_ptr();
  return column;
}

void Collator::add_row(Column& column, const Value& part, const Path& path) {
  const bool is_sequence = part.kind() == Kind::kList || part.kind() == Kind::kTuple;
  const bool wants_sequence = column.kind == Kind::kList || column.kind == Kind::kTuple;
  if (part.kind() != column.kind && !(is_sequence && wants_sequence)) {
    const bool is_wide = column.kind == Kind::kNumber && part.kind() == Kind::kInteger;
    if (!is_wide) {
      refuse("the samples of a batch differ: sample " + std::to_string(count_) + " has " + part.describe() +
                 ", which has another type in the first sample; all samples must have the same structure",
             path);
    }
  }
  switch (column.kind) {
    case Kind::kTensor: return copy_tensor(column, part.tensor(), path);
    case Kind::kBoolean: static_cast<bool*>(column.data)[count_] = part.boolean(); return;
    case Kind::kInteger: static_cast<int64_t*>(column.data)[count_] = part.integer(); return;
    case Kind::kNumber: static_cast<double*>(column.data)[count_] = part.number(); return;
    case Kind::kText:
    case Kind::kBytes: column.items.push_back(part); return;
    case Kind::kList:
    case Kind::kTuple: {
      if (part.size() != column.parts.size()) refuse("each element in list of batch should be of equal size", path);
      for (size_t index = 0; index < column.parts.size(); ++index)
        add_row(column.parts[index], part[index], {.parent = &path, .index = index});
      return;
    }
    case Kind::kDict: {
      for (size_t index = 0; index < column.parts.size(); ++index) {
        const Value& key = column.keys[index];
        const Value::Entries& entries = part.entries();
        const Value* found = nullptr;
        // Most samples have their entries in the same order.
        if (index < entries.size() && entries[index].key.kind() == Kind::kText && key.kind() == Kind::kText &&
            entries[index].key.text() == key.text()) {
          found = &entries[index].value;
        } else if (key.kind() == Kind::kText) {
          found = part.find(key.text());
        } else {
          for (const Value::Entry& entry : entries)
            if (entry.key.to_json() == key.to_json()) found = &entry.value;
        }
        if (found == nullptr) {
          refuse("sample " + std::to_string(count_) + " has no entry " + key.describe() +
                     ", which the first sample of its batch has; all samples must have the same entries",
                 path);
        }
        add_row(column.parts[index], *found, {.parent = &path, .key = &key});
      }
      return;
    }
    case Kind::kNone: return;
  }
}

void Collator::copy_tensor(const Column& column, const at::Tensor& row, const Path& path) const {
  check_tensor(row, path);
  const auto sizes = column.rows.sizes().slice(1);
  if (row.sizes() != sizes) {
    refuse("stack expects each tensor to be equal size, but got " + sizes_text(sizes) + " at entry 0 and " +
               sizes_text(row.sizes()) + " at entry " + std::to_string(count_),
           path);
  }
  if (row.scalar_type() != column.rows.scalar_type()) {
    refuse("the tensors of a batch must have one dtype, but got " + std::string(toString(column.rows.scalar_type())) +
               " at entry 0 and " + toString(row.scalar_type()) + " at entry " + std::to_string(count_),
           path);
  }
  copy_row(column.rows, count_, row);
}

Value Collator::finish() {
  PENSTOCK_ASSERT(root_.has_value());
  return finish_column(*root_);
}

Value Collator::finish_column(Column& column) const {
  switch (column.kind) {
    case Kind::kTensor:
    case Kind::kBoolean:
    case Kind::kInteger:
    case Kind::kNumber: return {exact(column.rows)};
    case Kind::kText:
    case Kind::kBytes: return Value::list(std::move(column.items));
    case Kind::kList:
    case Kind::kTuple: {
      Value::Items items;
      for (Column& part : column.parts) items.push_back(finish_column(part));
      return Value::list(std::move(items));  // for tuples too, as in torch
    }
    case Kind::kDict: {
      Value::Entries entries;
      for (size_t index = 0; index < column.parts.size(); ++index)
        entries.push_back({.key = column.keys[index], .value = finish_column(column.parts[index])});
      return Value::dict(std::move(entries));
    }
    case Kind::kNone: break;
  }
  return {};
}

// For a short batch, returns a copy in memory of its exact size.
at::Tensor Collator::exact(const at::Tensor& rows) const {
  if (count_ == capacity_) return rows;
  const at::Tensor part = rows.narrow(0, 0, static_cast<int64_t>(count_));
  at::Tensor copy = memory_.empty(part.sizes(), part.scalar_type());
  copy.copy_(part);
  return copy;
}

void copy_bypassing_caches(void* target, const void* source, size_t bytes) {
#ifdef __SSE2__
  constexpr size_t kLineBytes = 64;
  auto* to = static_cast<std::byte*>(target);
  const auto* from = static_cast<const std::byte*>(source);
  // A line that is written in full leaves the processor as a whole; the ends are copied with memcpy.
  const size_t misalignment = reinterpret_cast<uintptr_t>(to) % kLineBytes;
  const size_t head_bytes = std::min(bytes, (kLineBytes - misalignment) % kLineBytes);
  std::memcpy(to, from, head_bytes);
  size_t at = head_bytes;
  for (; at + kLineBytes <= bytes; at += kLineBytes) {
    const auto* words = reinterpret_cast<const __m128i*>(from + at);
    const __m128i first = _mm_loadu_si128(words);
    const __m128i second = _mm_loadu_si128(words + 1);
    const __m128i third = _mm_loadu_si128(words + 2);
    const __m128i fourth = _mm_loadu_si128(words + 3);
    auto* line = reinterpret_cast<__m128i*>(to + at);
    _mm_stream_si128(line, first);
    _mm_stream_si128(line + 1, second);
    _mm_stream_si128(line + 2, third);
    _mm_stream_si128(line + 3, fourth);
  }
  std::memcpy(to + at, from + at, bytes - at);
  _mm_sfence();
#else
  std::memcpy(target, source, bytes);
#endif
}

namespace {

// A batch of this size has left a core's private caches before the trainer reads its first byte. Smaller ones are best
// kept there, and rows below a few pages cost more in fences than their stores save.
constexpr size_t kUncachedBatchBytes = 8 << 20;
constexpr size_t kUncachedRowBytes = 16 << 10;

void copy_plainly(void* target, const void* source, size_t bytes) { std::memcpy(target, source, bytes); }

}  // namespace

CopyBytes copy_of_rows(size_t count, size_t row_bytes) {
  const bool is_uncached = row_bytes >= kUncachedRowBytes && count * row_bytes >= kUncachedBatchBytes;
  return is_uncached ? copy_bypassing_caches : copy_plainly;
}

void copy_row(const at::Tensor& batch, size_t place, const at::Tensor& row) {
  if (!row.is_contiguous()) {
    batch.select(0, static_cast<int64_t>(place)).copy_(row);
    return;
  }
  const size_t bytes = row.nbytes();
  if (bytes == 0) return;
  auto* const target = static_cast<std::byte*>(batch.mutable_data_ptr()) + place * bytes;
  copy_of_rows(static_cast<size_t>(batch.size(0)), bytes)(target, row.const_data_ptr(), bytes);
}

}  // namespace penstock::dataset
