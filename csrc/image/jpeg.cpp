// SPDX-License-Identifier: Apache-2.0
#include "image/jpeg.h"

#include <dlfcn.h>

#include <map>

#include "base/mutex.h"
#include "image/jpeg_layout.h"

namespace penstock::image {

Result<const JpegLibrary*> JpegLibrary::find(const std::string& path) {
  static Mutex mutex;
  static auto& found = *new std::map<std::string, std::unique_ptr<const JpegLibrary>>;  // for all threads' exits
  const MutexLock lock(mutex);
  if (const auto known = found.find(path); known != found.end()) return known->second.get();
  void* const object = ::dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);  // stays open
  if (object == nullptr) return Fault{Errc::kUnsupported, path + " cannot be opened"};
  auto library = open_jpeg_layout_62(object);
  if (library == nullptr) library = open_jpeg_layout_80(object);
  if (library == nullptr)
    return Fault{Errc::kUnsupported,
                 path + " is not linked with a libjpeg-turbo of its own, with the interface of version 6.2 or 8.0"};
  return found.emplace(path, std::move(library)).first->second.get();
}

}  // namespace penstock::image
