// SPDX-License-Identifier: Apache-2.0
#pragma once
// Datasets for worker processes: a plug-in is a shared library with named dataset factories.
//
//   #include <penstock/penstock.h>
//
//   class Photographs : public penstock::Dataset { ... };
//
//   PENSTOCK_DATASET(photographs, [](const penstock::Value& arguments) {
//     return std::make_shared<Photographs>(arguments["folder"].text());
//   })
//
//   add_library(photographs MODULE photographs.cpp)                    # CMakeLists.txt
//   target_link_libraries(photographs penstock::penstock)
//
// A worker process (penstock-worker) loads the plug-in when a job asks for it, and creates the dataset once per job.
// Plug-in, worker and trainer must be built for the same version of torch.

#include "penstock/any_dataset.h"
#include "penstock/export.h"
#include "penstock/value.h"

namespace penstock {

// A plug-in's description of one of its datasets. The first two members keep their positions in later versions.
struct PluginEntry {
  const char* penstock_version = PENSTOCK_VERSION;
  TorchVersion torch = {};
  AnyDataset (*make)(const Value& arguments) = nullptr;
};

}  // namespace penstock

// Names a dataset; use it in the plug-in's global namespace. `name` is an identifier; the factory is called with the
// arguments of the PluginDataset and returns what a loader accepts: a shared_ptr to a dataset, or a dataset.
#define PENSTOCK_DATASET(name, ...)                                                                            \
  extern "C" __attribute__((visibility("default"))) const ::penstock::PluginEntry* penstock_dataset_##name() { \
    static const ::penstock::PluginEntry entry{                                                                \
        .make = [](const ::penstock::Value& arguments) -> ::penstock::AnyDataset {                             \
          return (__VA_ARGS__)(arguments);                                                                     \
        }};                                                                                                    \
    return &entry;                                                                                             \
  }
