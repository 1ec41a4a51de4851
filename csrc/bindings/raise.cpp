// SPDX-License-Identifier: Apache-2.0
#include "bindings/raise.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace py = pybind11;

namespace penstock::bindings {
namespace {

const char* exception_name(Errc code) {
  switch (code) {
    case Errc::kMalformed:
    case Errc::kTooLarge:
    case Errc::kMismatch: return nullptr;  // ValueError
    case Errc::kTimeout: return "TimeoutError";
    case Errc::kClosed: return "ClosedError";
    case Errc::kNoMemory: return "SharedMemoryError";
    case Errc::kUnsupported: return "UnsupportedError";
    case Errc::kFailed: return "PenstockError";
  }
  return "PenstockError";
}

}  // namespace

void stay_if_python_exits() {
#if PY_VERSION_HEX >= 0x030d0000
  const bool is_exiting = Py_IsFinalizing() != 0;
#else
  const bool is_exiting = _Py_IsFinalizing() != 0;
#endif
  const bool is_main_thread = ::syscall(SYS_gettid) == ::getpid();
  if (!is_exiting || is_main_thread) return;
  for (;;) ::pause();
}

void raise_error(const Fault& error) {
  const char* name = exception_name(error.code);
  if (name == nullptr) throw py::value_error(error.message);
  const py::object type = py::module_::import("penstock.errors").attr(name);
  PyErr_SetString(type.ptr(), error.message.c_str());
  throw py::error_already_set();
}

void raise_failure(const Fault& error) {
  const bool is_value_error = exception_name(error.code) == nullptr;
  raise_error({is_value_error ? Errc::kFailed : error.code, error.message});
}

}  // namespace penstock::bindings
