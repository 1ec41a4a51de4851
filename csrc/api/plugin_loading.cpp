// SPDX-License-Identifier: Apache-2.0
#include "api/plugin_loading.h"

#include <dlfcn.h>

#include <exception>
#include <string_view>

#include "api/torch_check.h"
#include "penstock/error.h"
#include "penstock/plugin.h"

namespace penstock::api {
namespace {

[[noreturn]] void refuse_plugin(const std::string& text) { throw Error(ErrorKind::kUnsupported, text); }

std::string_view minor_of(std::string_view version) { return version.substr(0, version.rfind('.')); }

}  // namespace

AnyDataset make_dataset_of(const PluginDataset& plugin) {
  const std::string spoken = "the plug-in " + plugin.path;
  // RTLD_NOW: a missing symbol is reported here, not in the middle of a batch.
  void* library = ::dlopen(plugin.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    refuse_plugin(spoken + " cannot be loaded: " + (why != nullptr ? why : "unknown reason") +
                  "; install it on the worker's machine, built against the worker's versions of penstock and torch");
  }
  using Ask = const PluginEntry* (*)();
  const auto ask = reinterpret_cast<Ask>(::dlsym(library, ("penstock_dataset_" + plugin.name).c_str()));
  if (ask == nullptr) {
    refuse_plugin(spoken + " does not define the dataset '" + plugin.name + "'; add PENSTOCK_DATASET(" + plugin.name +
                  ", factory) to it, in the global namespace");
  }
  const PluginEntry& entry = *ask();
  if (minor_of(entry.penstock_version) != minor_of(PENSTOCK_VERSION)) {
    refuse_plugin(spoken + " was built for penstock " + entry.penstock_version + ", and this is penstock " +
                  PENSTOCK_VERSION + "; rebuild it");
  }
  check_torch(entry.torch, spoken);
  try {
    AnyDataset made = entry.make(plugin.arguments);
    if (!made.by_index() && !made.as_streams())
      refuse_plugin(spoken + ": the factory of '" + plugin.name + "' returned no dataset");
    return made;
  } catch (const Error& error) {
    throw Error(error.kind(), spoken + ": the factory of '" + plugin.name + "' failed: " + error.what());
  } catch (const std::exception& error) {
    throw Error(ErrorKind::kDataset, spoken + ": the factory of '" + plugin.name + "' failed: " + error.what());
  }
}

}  // namespace penstock::api
