// SPDX-License-Identifier: Apache-2.0
#include "penstock/batch.h"

#include <string>

namespace penstock {
namespace {

const at::Tensor& tensor_of(const Value& part, const std::string& name) {
  if (!part.is_tensor()) detail::throw_misfit("batch[" + name + "]", "a tensor", part);
  return part.tensor();
}

}  // namespace

const at::Tensor& Batch::operator[](std::string_view name) const {
  return tensor_of(value_[name], "'" + std::string(name) + "'");
}

const at::Tensor& Batch::operator[](size_t position) const {
  return tensor_of(value_[position], std::to_string(position));
}

}  // namespace penstock
