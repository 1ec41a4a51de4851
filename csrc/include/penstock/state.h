// SPDX-License-Identifier: Apache-2.0
#pragma once
// A loader's position in its stream, from which a loader in another process can resume.

#include <memory>
#include <string>
#include <string_view>

#include "penstock/export.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace penstock {

// A value type. Its JSON text has the format of `json.dumps(loader.state_dict())` in the Python package, and each
// package can load the other's states:
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
  // A state without a position: a loader that loads it starts a new epoch.
  State();
  ~State();
  State(const State&);
  State& operator=(const State&);
  State(State&&) noexcept;
  State& operator=(State&&) noexcept;

  // Throws kValue if the text is not the JSON of a state.
  static State from_json(std::string_view text);
  std::string to_json() const;

  // Uses the key "penstock.loader". load() throws kValue if the archive does not contain it.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  friend struct StateAccess;
  struct Content;

  std::unique_ptr<Content> content_;
};

}  // namespace penstock
