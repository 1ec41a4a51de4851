// SPDX-License-Identifier: Apache-2.0
#include "penstock/error.h"

#include <utility>

namespace penstock {

Error::Error(ErrorKind kind, const std::string& text, std::exception_ptr cause)
    : std::runtime_error(text), kind_(kind), cause_(std::move(cause)) {}
Error::Error(const Error&) noexcept = default;
Error& Error::operator=(const Error&) noexcept = default;
Error::~Error() = default;

}  // namespace penstock
