// SPDX-License-Identifier: Apache-2.0
#include "graph/ir_text.h"

#include <array>
#include <charconv>
#include <type_traits>

#include "base/bytes.h"
#include "base/result.h"

namespace penstock::graph {
namespace {

void print_quoted(std::string& text, std::string_view content) {
  text += '"';
  for (const char c : content) {
    const auto byte = static_cast<unsigned char>(c);
    switch (c) {
      case '"': text += "\\\""; break;
      case '\\': text += "\\\\"; break;
      case '\n': text += "\\n"; break;
      case '\r': text += "\\r"; break;
      case '\t': text += "\\t"; break;
      default:
        if (byte >= 0x20 && byte < 0x7f) {
          text += c;
        } else {
          text += "\\x";
          append_hex(text, byte);
        }
    }
  }
  text += '"';
}

// The shortest digits that read back to the same bits, marked so that they do not read back as an integer.
void print_real(std::string& text, double value) {
  std::array<char, 32> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  const std::string_view printed(digits.data(), static_cast<size_t>(end - digits.data()));
  text += printed;
  if (printed.find_first_of(".en") == std::string_view::npos) text += ".0";
}

void print_name(std::string& text, const Graph& graph, ValueId value) {
  PENSTOCK_ASSERT(value < graph.value_names.size(), "value ", value, " of ", graph.value_names.size());
  text += '%';
  text += graph.value_names[value];
}

void print_sizes(std::string& text, const std::vector<Dim>& sizes) {
  text += '[';
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) text += ", ";
    if (const auto* number = std::get_if<int64_t>(&sizes[i]))
      text += std::to_string(*number);
    else
      text += std::get<std::string>(sizes[i]);
  }
  text += ']';
}

void print_input(std::string& text, const Graph& graph, const Input& input) {
  text += "input ";
  print_name(text, graph, input.value);
  switch (input.kind) {
    case InputKind::kLeaf: text += " leaf " + std::to_string(input.leaf_index); break;
    case InputKind::kConst: text += " const "; break;
    case InputKind::kState: text += " state "; break;
    case InputKind::kInt: text += " int "; break;
  }
  if (input.kind != InputKind::kLeaf) print_quoted(text, input.source);
  if (input.kind == InputKind::kInt) {
    if (input.size_of) {
      text += " = ";
      print_name(text, graph, input.size_of->tensor);
      text += ".size(" + std::to_string(input.size_of->dim) + ")";
    }
  } else {
    text += ' ';
    text += name_of(input.dtype);
    text += ' ';
    print_sizes(text, input.sizes);
    if (!input.digest.empty()) {
      text += " digest ";
      print_quoted(text, input.digest);
    }
  }
  text += '\n';
}

void print_on_device(std::string& text, const OnDevice& on) {
  text += " on ";
  text += name_of(on.device);
  text += " [";
  const char* separator = "";
  for (const OperandForm& operand : on.operands) {
    text += separator;
    if (operand.is_on_host) text += "cpu ";
    text += operand.dtype ? name_of(*operand.dtype) : "int";
    separator = ", ";
  }
  text += ']';
}

void print_statement(std::string& text, const Graph& graph, const Node& node) {
  const auto print_value = [&graph](std::string& out, ValueId value) { print_name(out, graph, value); };
  for (size_t i = 0; i < node.results.size(); ++i) {
    if (i > 0) text += ", ";
    print_name(text, graph, node.results[i]);
  }
  if (!node.results.empty()) text += " = ";
  text += node.op;
  text += '(';
  const char* separator = "";
  for (const Argument& argument : node.args) {
    text += separator;
    print_argument(text, argument, print_value);
    separator = ", ";
  }
  for (const Keyword& keyword : node.kwargs) {
    text += separator;
    text += keyword.name;
    text += '=';
    print_argument(text, keyword.value, print_value);
    separator = ", ";
  }
  text += ')';
  if (node.on) print_on_device(text, *node.on);
  if (node.group) {
    text += " group " + std::to_string(*node.group) + " ";
    print_quoted(text, node.label);
  }
  if (!node.place.empty()) {
    text += " at ";
    print_quoted(text, node.place);
  }
}

}  // namespace

void print_argument(std::string& text, const Argument& argument,
                    const std::function<void(std::string&, ValueId)>& print_value) {
  std::visit(
      [&](const auto& data) {
        using T = std::decay_t<decltype(data)>;
        if constexpr (std::is_same_v<T, None>) {
          text += "none";
        } else if constexpr (std::is_same_v<T, bool>) {
          text += data ? "true" : "false";
        } else if constexpr (std::is_same_v<T, int64_t>) {
          text += std::to_string(data);
        } else if constexpr (std::is_same_v<T, Real>) {
          print_real(text, data.value);
        } else if constexpr (std::is_same_v<T, std::string>) {
          print_quoted(text, data);
        } else if constexpr (std::is_same_v<T, Dtype>) {
          text += "dtype:";
          text += name_of(data);
        } else if constexpr (std::is_same_v<T, Layout>) {
          text += "layout:";
          text += name_of(data);
        } else if constexpr (std::is_same_v<T, MemoryFormat>) {
          text += "memory_format:";
          text += name_of(data);
        } else if constexpr (std::is_same_v<T, Device>) {
          text += "device:";
          text += name_of(data);
        } else if constexpr (std::is_same_v<T, ValueRef>) {
          print_value(text, data.id);
        } else {
          static_assert(std::is_same_v<T, Argument::List>);
          text += '[';
          for (size_t i = 0; i < data.size(); ++i) {
            if (i > 0) text += ", ";
            print_argument(text, data[i], print_value);
          }
          text += ']';
        }
      },
      argument.data);
}

std::string print_node(const Graph& graph, const Node& node) {
  std::string text;
  print_statement(text, graph, node);
  return text;
}

std::string describe(const Node& node) {
  const std::string place = node.place.empty() ? "" : " at " + node.place;
  if (node.label.empty()) return node.op + place;
  return node.op + (node.label.ends_with(place) ? "" : place) + " (" + node.label + ")";
}

std::string print_graph(const Graph& graph) {
  std::string text = "penstock-ir 1\n";
  for (const Input& input : graph.inputs) print_input(text, graph, input);
  for (const Node& node : graph.nodes) {
    print_statement(text, graph, node);
    text += '\n';
  }
  for (const Output& output : graph.outputs) {
    text += "output ";
    print_name(text, graph, output.value);
    if (!output.key.empty()) {
      text += " key ";
      print_quoted(text, output.key);
    }
    text += '\n';
  }
  return text;
}

}  // namespace penstock::graph
