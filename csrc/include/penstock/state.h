// SPDX-License-Identifier: Apache-2.0
#pragma once
// The place of a loader in its stream, from which a loader in another process goes on.

#include <memory>
#include <string>
#include <string_view>

#include "penstock/export.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace penstock {

// A value type. The JSON text is that of `json.dumps(loader.state_dict())` of the Python package, and each of the two
// loads the other's:
//
//   std::ofstream("loader.json") << loader.state().to_json();                        // C++
//   loader.load_state_dict(json.loads(Path("loader.json").read_text()))              # Python
//
// In a checkpoint of torch's C++ library:
//
//   torch::serialize::OutputArchive archive;
//   model->save(archive);
//   loader.state().save(archive);
//   archive.save_to("checkpoint.pt");
class PENSTOCK_API State {
 public:
  // A state without a place: a loader that loads it begins a new epoch.
  State();
  ~State();
  State(const State&);
  State& operator=(const State&);
  State(State&&) noexcept;
  State& operator=(State&&) noexcept;

  // Throws kValue for text that is not the JSON of a state.
  static State from_json(std::string_view text);
  std::string to_json() const;

  // Under the key "penstock.loader". load() throws kValue where the archive has none.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  friend struct StateAccess;
  struct Content;

  std::unique_ptr<Content> content_;
};

}  // namespace penstock
