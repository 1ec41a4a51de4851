// SPDX-License-Identifier: Apache-2.0
// Autocast by the lists that torch has for GPUs. Boxed: the templates of torch's own take minutes to compile.

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <string>

namespace {

using torch::jit::Stack;

// Calls the operator below autocast, with `cast` tensors.
template <typename Cast>
void run_cast(const c10::OperatorHandle& op, Stack* stack, Cast cast) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));
  const auto argument_count = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  for (auto value = stack->end() - argument_count; value != stack->end(); ++value) {
    if (value->isTensor()) {
      *value = cast(value->toTensor());
    } else if (value->isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value->toTensorVector()) tensors.push_back(cast(tensor));
      *value = tensors;
    }
  }
  op.callBoxed(stack);
}

void run_as(at::ScalarType dtype, const c10::OperatorHandle& op, Stack* stack) {
  run_cast(op, stack, [&](const at::Tensor& tensor) {
    return tensor.defined() ? at::autocast::cached_cast(dtype, tensor, c10::kPrivateUse1) : tensor;
  });
}

void run_lower(const c10::OperatorHandle& op, Stack* stack) {
  run_as(at::autocast::get_autocast_dtype(c10::kPrivateUse1), op, stack);
}

void run_in_float(const c10::OperatorHandle& op, Stack* stack) { run_as(at::kFloat, op, stack); }

void run_promoted(const c10::OperatorHandle& op, Stack* stack) {
  at::ScalarType widest = at::autocast::get_autocast_dtype(c10::kPrivateUse1);
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) widest = at::autocast::prioritize(widest, value.toTensor(), c10::kPrivateUse1);
    if (value.isTensorList()) widest = at::autocast::prioritize(widest, value.toTensorVector(), c10::kPrivateUse1);
  }
  run_as(widest, op, stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define NAME(OP, ...) "aten::" #OP __VA_OPT__("." #__VA_ARGS__),

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* const name : {AT_FORALL_LOWER_PRECISION_FP(NAME)})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_lower>());
  for (const char* const name : {AT_FORALL_FP32(NAME) AT_FORALL_FP32_SET_OPT_DTYPE(NAME)})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_in_float>());
  for (const char* const name : {AT_FORALL_PROMOTE(NAME) "aten::cat", "aten::stack"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_promoted>());
}

}  // namespace
