// SPDX-License-Identifier: Apache-2.0
#include "api/library_folder.h"

#include <dlfcn.h>

#include <filesystem>
#include <system_error>

namespace penstock::api {

std::string program_beside_library(const std::string& name) {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&program_beside_library), &info) != 0 && info.dli_fname != nullptr) {
    std::error_code error;
    const auto library = std::filesystem::canonical(info.dli_fname, error);
    const auto program = library.parent_path() / name;
    if (!error && std::filesystem::exists(program, error)) return program.string();
  }
  return name;
}

}  // namespace penstock::api
