// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sets torch's thread-local state for running the operators of a prefix, and restores it in the destructor.
//
// Results are plain tensors that the trainer's autograd can use: inference mode would be a little faster, but its
// tensors cannot be saved for backward. Autocast is off because a capture under autocast contains its casts as separate
// operators. Python's dispatch modes are left out, since they would take the GIL at every operator.

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace penstock::runtime {

class ExecutionGuard {
 public:
  ExecutionGuard() = default;
  ExecutionGuard(const ExecutionGuard&) = delete;
  ExecutionGuard& operator=(const ExecutionGuard&) = delete;

 private:
  c10::AutoGradMode no_grad_{false};
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard no_python_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

}  // namespace penstock::runtime
