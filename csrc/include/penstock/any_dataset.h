// SPDX-License-Identifier: Apache-2.0
#pragma once
// The datasets that a loader can read: objects in this program, and named datasets that worker processes create.

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "penstock/dataset.h"
#include "penstock/value.h"

namespace penstock {

// A dataset from a plug-in (plugin.h). Each worker process, on this machine or in a pool, creates its own instance.
// Without workers and without a pool, the program itself loads the plug-in.
//
//   penstock::PluginDataset dataset{.path = "/opt/datasets/libphotographs.so", .name = "photographs",
//                                   .arguments = penstock::Value::from_json(R"({"folder": "/data/train"})")};
struct PluginDataset {
  std::string path;      // path of the shared library, which must exist on every worker's machine
  std::string name;      // the name given to PENSTOCK_DATASET
  Value arguments = {};  // arguments of the factory: plain values
};

// A dataset written in Python, which only worker processes load: this process runs no Python. `factory` is called with
// the entries of `arguments` as keyword arguments and returns a map-style or iterable torch dataset.
//
//   penstock::PythonDataset dataset{.factory = "my_package.datasets:photographs",
//                                   .arguments = penstock::Value::dict({{"folder", "/data/train"}})};
//
// Workers on this machine run the interpreter named by PENSTOCK_PYTHON, or python3, in this program's working
// directory; pool workers are started with `penstock worker`. The module must be importable in both.
struct PythonDataset {
  std::string factory;   // "module:function"
  Value arguments = {};  // a dict of plain values
};

// Any of these datasets. An object of this program is shared with the caller, or moved into the loader.
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
  // The object of that kind in this program; null if the dataset is of another kind.
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
