// SPDX-License-Identifier: Apache-2.0
#include "penstock/batch.h"

#include <string>

#include "api/batch_origin.h"

namespace penstock {
namespace {

const at::Tensor& tensor_of(const Value& part, const std::string& name) {
  if (!part.is_tensor()) detail::throw_misfit("batch[" + name + "]", "a tensor", part);
  return part.tensor();
}

}  // namespace

const at::Tensor& Batch::operator[](std::string_view name) const {
  const at::Tensor& came = tensor_of(value_[name], "'" + std::string(name) + "'");
  return origin_ ? origin_->read(came) : came;
}

const at::Tensor& Batch::operator[](size_t position) const {
  const at::Tensor& came = tensor_of(value_[position], std::to_string(position));
  return origin_ ? origin_->read(came) : came;
}

const Value& Batch::read() const { return origin_->read_all(value_); }

}  // namespace penstock
