// SPDX-License-Identifier: Apache-2.0
#include "graph/device_bits.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "base/result.h"
#include "graph/device_bits_tables.h"

namespace penstock::graph {
namespace {

constexpr std::string_view kAten = "aten::";

// Forms, by the result of their measurement.
struct BitsTable {
  using Forms = std::set<std::string, std::less<>>;
  Forms equal;
  Forms differing;
  Forms by_reciprocal;  // divisions by a number
};

// Takes the next word off the line. Words end at blanks outside of parentheses and quotes.
std::string_view take_word(std::string_view& line) {
  const size_t start = std::min(line.find_first_not_of(' '), line.size());
  line.remove_prefix(start);
  int depth = 0;
  bool is_quoted = false;
  size_t end = 0;
  for (; end < line.size(); ++end) {
    const char c = line[end];
    if (c == '"') is_quoted = !is_quoted;
    if (c == '(') ++depth;
    if (c == ')') --depth;
    if (c == ' ' && depth == 0 && !is_quoted) break;
  }
  const std::string_view word = line.substr(0, end);
  line.remove_prefix(end);
  return word;
}

bool is_word_char(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

// Returns the form with every T replaced by the dtype.
std::string with_dtype(std::string_view form, std::string_view dtype) {
  std::string text;
  const size_t arguments = form.find('(');
  for (size_t i = 0; i < form.size(); ++i) {
    const bool is_word = i > arguments && form[i] == 'T' && !is_word_char(form[i - 1]) &&
                         (i + 1 == form.size() || !is_word_char(form[i + 1]));
    if (is_word)
      text += dtype;
    else
      text += form[i];
  }
  return text;
}

class Tables {
 public:
  static Tables& all() {
    static Tables tables;
    return tables;
  }

  Result<void> add(std::string_view text) {
    std::string device;
    BitsTable table;
    for (size_t line_number = 1; !text.empty(); ++line_number) {
      const size_t end = std::min(text.find('\n'), text.size());
      const std::string_view line = text.substr(0, end);
      text.remove_prefix(std::min(end + 1, text.size()));
      if (!read_line(line, line_number, device, table))
        return Fault{Errc::kMalformed,
                     "line " + std::to_string(line_number) + " of a table of device bits is malformed: " +
                         std::string(line.substr(0, 80)) + "; write the table with tests/device/measure_bits.py"};
    }
    if (device.empty()) return Fault{Errc::kMalformed, "a table of device bits names no device; it is truncated"};
    const std::lock_guard lock(mutex_);
    BitsTable& known = tables_[device];
    known.equal.merge(table.equal);
    known.differing.merge(table.differing);
    known.by_reciprocal.merge(table.by_reciprocal);
    return {};
  }

  // Whether the form is equal, and whether it was measured at all.
  std::pair<bool, bool> find(const std::string& device, const std::string& form) const {
    const std::lock_guard lock(mutex_);
    const auto table = tables_.find(device);
    if (table == tables_.end()) return {false, false};
    // A form that differs on one device is not equal, even if it is on another.
    if (table->second.differing.contains(form)) return {false, true};
    const bool is_equal = table->second.equal.contains(form);
    return {is_equal, is_equal};
  }

  bool divides_by_reciprocal(const std::string& device, const std::string& form) const {
    const std::lock_guard lock(mutex_);
    const auto table = tables_.find(device);
    return table != tables_.end() && table->second.by_reciprocal.contains(form);
  }

 private:
  Tables() {
    for (const std::string_view table : kDeviceBitsTables) {
      const auto added = add(table);
      PENSTOCK_ASSERT(added, added.error().message);
    }
  }

  static bool read_line(std::string_view line, size_t line_number, std::string& device, BitsTable& table) {
    const std::string_view kind = take_word(line);
    if (line_number == 1) return kind == "penstock-device-bits" && take_word(line) == "1";
    if (kind.empty() || kind.starts_with('#') || kind == "measured") return true;
    if (kind == "device") {
      device = take_word(line);
      return !device.empty();
    }
    if (kind != "equal" && kind != "differs" && kind != "reciprocal") return false;
    const std::string_view form = take_word(line);
    if (form.find('(') == std::string_view::npos || !form.ends_with(')')) return false;
    BitsTable::Forms& forms = kind == "equal" ? table.equal : kind == "differs" ? table.differing : table.by_reciprocal;
    std::string_view dtype = take_word(line);
    if (dtype.empty()) forms.emplace(form);
    for (; !dtype.empty(); dtype = take_word(line)) {
      if (!name_in<Dtype>(kDtypeNames, dtype)) return false;
      forms.insert(with_dtype(form, dtype));
    }
    return true;
  }

  mutable std::mutex mutex_;
  std::map<std::string, BitsTable, std::less<>> tables_;  // by type of device
};

// Writes the arguments of a node as a form; operands are in the order of for_each_operand().
class FormWriter {
 public:
  explicit FormWriter(const Node& node) : node_(node) {}

  std::string write() {
    text_ = node_.op.starts_with(kAten) ? node_.op.substr(kAten.size()) : node_.op;
    text_ += '(';
    const char* separator = "";
    for (const Argument& argument : node_.args) {
      text_ += separator + format_argument(argument);
      separator = ",";
    }
    for (const Keyword& keyword : node_.kwargs) {
      if (keyword.value.get<None>() != nullptr) continue;
      if (keyword.name == "device" || keyword.name == "non_blocking" || keyword.name == "pin_memory") continue;
      text_ += separator + keyword.name + "=" + format_argument(keyword.value);
      separator = ",";
    }
    return text_ + ")";
  }

 private:
  std::string format_argument(const Argument& argument) {
    if (argument.get<ValueRef>() != nullptr) {
      const OperandForm& operand = node_.on->operands.at(place_++);
      return operand.dtype ? std::string(name_of(*operand.dtype)) : "i";
    }
    if (const auto* list = argument.get<Argument::List>()) return format_list(*list);
    if (const auto* truth = argument.get<bool>()) return *truth ? "true" : "false";
    if (argument.get<int64_t>() != nullptr) return "i";
    if (argument.get<Real>() != nullptr) return "f";
    if (argument.get<None>() != nullptr) return "none";
    if (argument.get<std::string>() != nullptr) return "str";
    if (const auto* dtype = argument.get<Dtype>()) return std::string(name_of(*dtype));
    if (const auto* layout = argument.get<Layout>()) return std::string(name_of(*layout));
    if (const auto* format = argument.get<MemoryFormat>()) return std::string(name_of(*format));
    return "other";
  }

  std::string format_list(const Argument::List& list) {
    std::vector<std::string> items;
    items.reserve(list.size());
    for (const Argument& item : list) items.push_back(format_argument(item));
    if (items.empty()) return "[]";
    if (std::all_of(items.begin(), items.end(), [&](const std::string& item) { return item == items.front(); }))
      return "[" + items.front() + "...]";
    std::string text = "[";
    for (const std::string& item : items) text += (text.size() > 1 ? "," : "") + item;
    return text + "]";
  }

  const Node& node_;
  size_t place_ = 0;
  std::string text_;
};

bool is_copy(const Node& node) { return node.op == "aten::alias" || node.op == "aten::_to_copy"; }

// Rewrites x / 255 as x * (1 / 255), with the factor rounded to the type of the operation: float32 for float32 and for
// integers, since graphs run under torch's original default dtype.
void divide_by_reciprocal(Node& node) {
  double divisor = 0;
  if (const auto* real = node.args[1].get<Real>())
    divisor = real->value;
  else if (const auto* integer = node.args[1].get<int64_t>())
    divisor = static_cast<double>(*integer);
  else
    return;
  const bool is_double = node.on->operands.front().dtype == Dtype::kFloat64;
  node.op = "aten::mul.Scalar";
  node.args[1] = {Real(is_double ? 1.0 / divisor : static_cast<double>(1.0F / static_cast<float>(divisor)))};
}

constexpr std::array<std::string_view, 19> kJumps = {"ceil",
                                                     "copysign",
                                                     "fake_quantize_per_channel_affine",
                                                     "fake_quantize_per_tensor_affine",
                                                     "fix",
                                                     "floor",
                                                     "floor_divide",
                                                     "fmod",
                                                     "frac",
                                                     "hardshrink",
                                                     "heaviside",
                                                     "histc",
                                                     "nextafter",
                                                     "remainder",
                                                     "round",
                                                     "sgn",
                                                     "sign",
                                                     "threshold",
                                                     "trunc"};

}  // namespace

std::span<const std::string_view> device_bits_tables() { return kDeviceBitsTables; }

Result<void> add_device_bits(std::string_view table) { return Tables::all().add(table); }

void put_equal_twins(Graph& graph) {
  for (Node& node : graph.nodes)
    if (node.on && node.op == "aten::div.Scalar" && node.args.size() == 2 &&
        Tables::all().divides_by_reciprocal(node.on->device.type, bits_form(node)))
      divide_by_reciprocal(node);
}

std::string bits_form(const Node& node) { return FormWriter(node).write(); }

std::string bit_difference_reason(const Node& node) {
  const OnDevice& on = *node.on;
  const std::string device = name_of(on.device);
  const bool is_mixed = std::any_of(on.operands.begin(), on.operands.end(),
                                    [](const OperandForm& operand) { return operand.is_on_host; });
  if (node.op == "aten::alias") return {};
  if (is_mixed && !is_copy(node)) return "reads tensors of the CPU and of " + device + " together";
  const auto [is_equal, is_measured] = Tables::all().find(on.device.type, bits_form(node));
  if (is_equal) return {};
  if (is_measured) return "has different last bits on " + device + " than on a CPU";
  return "is not known to have the same bits on " + device + " as on a CPU";
}

bool jumps(const Node& node) {
  if (node.op.ends_with("_mode")) return true;  // a division that rounds
  const std::string_view name = std::string_view(node.op).substr(0, node.op.find('.'));
  return name.starts_with(kAten) && std::count(kJumps.begin(), kJumps.end(), name.substr(kAten.size())) > 0;
}

}  // namespace penstock::graph
