// SPDX-License-Identifier: Apache-2.0
#include "api/surroundings.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace penstock::api {

std::optional<std::string> odd_surroundings() {
  for (const at::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES)
    if (at::autocast::is_autocast_enabled(device))
      return "autocast must be off for a TorchScript module to be captured";
  if (const auto dtype = c10::get_default_dtype_as_scalartype(); dtype != at::kFloat)
    return std::string("the default dtype is ") + c10::toString(dtype) + ", not Float";
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode))
    return "forward runs under a functorch transform";
  return std::nullopt;
}

}  // namespace penstock::api
