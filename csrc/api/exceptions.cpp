// SPDX-License-Identifier: Apache-2.0
#include "api/exceptions.h"

namespace penstock::api {
namespace {

ErrorKind kind_of(Errc code) {
  switch (code) {
    case Errc::kMalformed:
    case Errc::kTooLarge:
    case Errc::kMismatch: return ErrorKind::kValue;
    case Errc::kTimeout: return ErrorKind::kTimeout;
    case Errc::kClosed: return ErrorKind::kClosed;
    case Errc::kNoMemory: return ErrorKind::kMemory;
    case Errc::kUnsupported: return ErrorKind::kUnsupported;
    case Errc::kFailed: return ErrorKind::kFailed;
  }
  return ErrorKind::kFailed;
}

}  // namespace

void raise(const Fault& fault) { throw Error(kind_of(fault.code), fault.message); }

void raise_remote(const loader::BatchRecord::RemoteError& remote, std::string place) {
  std::string text = remote.text;
  // A text from another process starts with the place of that process, terminated by a zero byte.
  if (const size_t end = text.find('\0'); end != std::string::npos) {
    place += " (" + text.substr(0, end) + ")";
    text = text.substr(end + 1);
  }
  throw Error(ErrorKind::kDataset, "Caught " + remote.type_name + place + ".\n" + text, remote.cause);
}

void refuse(const std::string& text) { throw Error(ErrorKind::kValue, text); }

}  // namespace penstock::api
