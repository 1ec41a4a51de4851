// SPDX-License-Identifier: Apache-2.0
#pragma once
// The datasets that a loader can read: objects of this program, and those that are named and made in worker processes.

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "penstock/dataset.h"
#include "penstock/value.h"

namespace penstock {

// A dataset of a plug-in (plugin.h). It is made anew in each worker process, of this machine or of a pool. Without
// workers and pool the program itself loads the plug-in.
//
//   penstock::PluginDataset dataset{.path = "/opt/datasets/libphotographs.so", .name = "photographs",
//                                   .arguments = penstock::Value::from_json(R"({"folder": "/data/train"})")};
struct PluginDataset {
  std::string path;      // of the shared library, which has to be there on every worker's machine
  std::string name;      // that PENSTOCK_DATASET gave it
  Value arguments = {};  // for its factory: plain values
};

// A dataset in Python, for worker processes alone: no Python comes into this one. `factory` is called with the entries
// of `arguments` as keyword arguments, and returns a map-style or iterable dataset of torch.
//
//   penstock::PythonDataset dataset{.factory = "my_package.datasets:photographs",
//                                   .arguments = penstock::Value::dict({{"folder", "/data/train"}})};
//
// Workers of this machine run the interpreter that PENSTOCK_PYTHON names, or python3, in this program's folder; workers
// of a pool are those that `penstock worker` runs. The module has to be importable there.
struct PythonDataset {
  std::string factory;   // "module:function"
  Value arguments = {};  // a dict of plain values
};

// Any of them. An object of this program is shared with it, or moved into the loader.
class AnyDataset {
 public:
  using Kind = std::variant<std::shared_ptr<Dataset>, std::shared_ptr<IterableDataset>, PluginDataset, PythonDataset>;

  template <typename T>
  requires(std::derived_from<T, Dataset>) AnyDataset(std::shared_ptr<T> dataset)
      : kind_(std::shared_ptr<Dataset>(std::move(dataset))) {}
  template <typename T>
  requires(std::derived_from<T, IterableDataset>) AnyDataset(std::shared_ptr<T> dataset)
      : kind_(std::shared_ptr<IterableDataset>(std::move(dataset))) {}
  template <typename T>
  requires(std::derived_from<T, Dataset> || std::derived_from<T, IterableDataset>) AnyDataset(T dataset)
      : AnyDataset(std::make_shared<T>(std::move(dataset))) {}
  AnyDataset(PluginDataset dataset) : kind_(std::move(dataset)) {}
  AnyDataset(PythonDataset dataset) : kind_(std::move(dataset)) {}

  const Kind& kind() const { return kind_; }
  // An object of this program of that kind; null if it is none.
  std::shared_ptr<Dataset> by_index() const { return as<std::shared_ptr<Dataset>>(); }
  std::shared_ptr<IterableDataset> as_streams() const { return as<std::shared_ptr<IterableDataset>>(); }

 private:
  template <typename T>
  T as() const {
    const T* found = std::get_if<T>(&kind_);
    return found != nullptr ? *found : T();
  }

  Kind kind_;
};

}  // namespace penstock
