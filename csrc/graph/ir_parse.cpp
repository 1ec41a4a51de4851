// SPDX-License-Identifier: Apache-2.0
#include "graph/ir_parse.h"

#include <charconv>
#include <unordered_map>
#include <unordered_set>

#include "graph/ir_text.h"

namespace penstock::graph {
namespace {

// Not the <cctype> functions: they read the process's locale.
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_char(char c) { return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

}  // namespace

bool Cursor::next_line() {
  while (ok() && !text_.empty()) {
    const size_t end = text_.find('\n');
    line_ = text_.substr(0, end);
    text_ = end == std::string_view::npos ? std::string_view() : text_.substr(end + 1);
    ++line_number_;
    position_ = 0;
    if (!at_line_end()) return true;
  }
  return false;
}

void Cursor::fail(std::string_view expected, Errc code) {
  if (error_) return;
  std::string seen = "the end of the line";
  if (position_ < line_.size()) {
    seen = "'";
    for (const char c : line_.substr(position_, 16)) seen += c >= 0x20 && c < 0x7f ? c : '?';
    seen += "'";
  }
  error_ = Fault{code, "the graph's text has " + seen + " at line " + std::to_string(line_number_) + ", column " +
                           std::to_string(position_ + 1) + " where " + std::string(expected) + " was expected"};
}

void Cursor::skip_blanks() {
  while (current() == ' ') ++position_;
}

bool Cursor::at_line_end() {
  skip_blanks();
  return position_ == line_.size();
}

bool Cursor::peek(std::string_view token) {
  skip_blanks();
  return ok() && line_.substr(position_, token.size()) == token;
}

bool Cursor::try_take(std::string_view token) {
  if (!peek(token)) return false;
  // A word must end with the token: `group` does not match the start of `groups`.
  const size_t end = position_ + token.size();
  if (is_name_char(token.back()) && end < line_.size() && is_name_char(line_[end])) return false;
  position_ = end;
  return true;
}

void Cursor::take(std::string_view token) {
  if (ok() && !try_take(token)) fail("'" + std::string(token) + "'");
}

void Cursor::take_line_end() {
  if (ok() && !at_line_end()) fail("the end of the line");
}

std::string Cursor::take_name() {
  skip_blanks();
  const size_t start = position_;
  while (is_name_char(current())) ++position_;
  const size_t size = position_ - start;
  if (size == 0 || size > kNameBytesMax) {
    position_ = start;
    fail("a name of 1 to " + std::to_string(kNameBytesMax) + " letters, digits or '_'");
    return {};
  }
  return std::string(line_.substr(start, size));
}

std::string Cursor::take_operator() {
  std::string op = take_name();
  if (!peek("::")) fail("'::' and the rest of an operator's name");
  while (ok() && try_take("::")) op += "::" + take_name();
  if (ok() && try_take(".")) op += "." + take_name();
  if (ok() && op.size() > kNameBytesMax)
    fail("an operator's name of at most " + std::to_string(kNameBytesMax) + " bytes");
  return op;
}

int Cursor::take_hex_digit() {
  const char c = current();
  int digit = -1;
  if (is_digit(c)) digit = c - '0';
  if (c >= 'a' && c <= 'f') digit = c - 'a' + 10;
  if (digit >= 0) ++position_;
  return digit;
}

std::string Cursor::take_quoted() {
  take("\"");
  std::string content;
  while (ok()) {
    if (position_ >= line_.size()) fail("a closing '\"'");
    if (content.size() > kQuotedBytesMax)
      fail("a quoted text of at most " + std::to_string(kQuotedBytesMax) + " bytes", Errc::kTooLarge);
    if (!ok()) break;
    const char c = line_[position_++];
    if (c == '"') return content;
    if (c != '\\') {
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
        --position_;
        fail("a printable character or an escape");
      }
      content += c;
      continue;
    }
    const char escape = current();
    if (position_ < line_.size()) ++position_;
    switch (escape) {
      case '"': content += '"'; break;
      case '\\': content += '\\'; break;
      case 'n': content += '\n'; break;
      case 'r': content += '\r'; break;
      case 't': content += '\t'; break;
      case 'x': {
        const int high = take_hex_digit();
        const int low = high < 0 ? -1 : take_hex_digit();
        if (low < 0) fail("two hex digits in lower case");
        content += static_cast<char>(high * 16 + low);
        break;
      }
      default: fail("an escape among \\\" \\\\ \\n \\r \\t \\xHH");
    }
  }
  return {};
}

std::string Cursor::take_digest() {
  std::string digest = take_quoted();
  bool is_hex = digest.size() == 32;
  for (const char c : digest) is_hex = is_hex && (is_digit(c) || (c >= 'a' && c <= 'f'));
  if (ok() && !is_hex) fail("32 hex digits in quotes before this");
  return digest;
}

uint32_t Cursor::take_count(uint32_t max) {
  skip_blanks();
  const size_t start = position_;
  while (is_digit(current())) ++position_;
  uint32_t count = 0;
  const auto [end, failure] = std::from_chars(line_.data() + start, line_.data() + position_, count);
  if (position_ == start || failure != std::errc() || count > max) {
    position_ = start;
    fail("a number from 0 to " + std::to_string(max));
    return 0;
  }
  return count;
}

std::string_view Cursor::take_number() {
  skip_blanks();
  const size_t start = position_;
  if (current() == '-') ++position_;
  while (is_name_char(current()) || current() == '.' ||
         ((current() == '-' || current() == '+') && line_[position_ - 1] == 'e'))
    ++position_;
  return line_.substr(start, position_ - start);
}

namespace {

constexpr uint32_t kLeafIndexMax = 65'535;
constexpr uint32_t kGroupMax = 1'000'000'000;
constexpr uint32_t kDeviceIndexMax = 255;

// Parses graphs. In addition to the grammar it checks the invariants on which every later step relies: values are
// defined once and before their use, each leaf appears once, inputs precede nodes and nodes precede outputs.
class Parser {
 public:
  explicit Parser(std::string_view text) : cursor_(text) {}

  Result<Graph> parse() {
    if (!cursor_.next_line()) cursor_.fail("'penstock-ir 1'");
    cursor_.take("penstock-ir");
    cursor_.take("1");
    cursor_.take_line_end();
    while (cursor_.ok() && cursor_.next_line()) {
      parse_statement();
      cursor_.take_line_end();
    }
    if (!cursor_.ok()) return cursor_.error();
    return std::move(graph_);
  }

 private:
  enum class Part : uint8_t { kInputs, kNodes, kOutputs };

  void parse_statement() {
    if (cursor_.peek("input ")) {
      enter(Part::kInputs, graph_.inputs.size(), kInputsMax);
      parse_input();
    } else if (cursor_.peek("output ")) {
      enter(Part::kOutputs, graph_.outputs.size(), kInputsMax);
      parse_output();
    } else {
      enter(Part::kNodes, graph_.nodes.size(), kNodesMax);
      parse_node();
    }
  }

  void enter(Part part, size_t count, size_t count_max) {
    if (part < part_) cursor_.fail("inputs first, then nodes, then outputs");
    if (count >= count_max) cursor_.fail("no more than " + std::to_string(count_max) + " of these", Errc::kTooLarge);
    part_ = part;
  }

  ValueId define() {
    cursor_.take("%");
    std::string name = cursor_.take_name();
    if (!cursor_.ok()) return 0;
    if (graph_.value_names.size() >= kValuesMax) cursor_.fail("fewer values", Errc::kTooLarge);
    const ValueId value = static_cast<ValueId>(graph_.value_names.size());
    if (!values_.emplace(name, value).second) cursor_.fail("a name that is not taken yet, not '" + name + "',");
    if (!cursor_.ok()) return 0;
    return graph_.add_value(std::move(name));
  }

  ValueId use() {
    cursor_.take("%");
    const std::string name = cursor_.take_name();
    const auto found = values_.find(name);
    if (cursor_.ok() && found == values_.end()) cursor_.fail("a value defined above, not '" + name + "',");
    return cursor_.ok() ? found->second : 0;
  }

  void parse_input() {
    cursor_.take("input");
    Input input;
    input.value = define();
    if (cursor_.try_take("leaf")) {
      input.kind = InputKind::kLeaf;
      input.leaf_index = cursor_.take_count(kLeafIndexMax);
      if (cursor_.ok() && !leaf_indices_.insert(input.leaf_index).second) cursor_.fail("a leaf not named above");
    } else if (cursor_.try_take("const")) {
      input.kind = InputKind::kConst;
    } else if (cursor_.try_take("state")) {
      input.kind = InputKind::kState;
    } else if (cursor_.try_take("int")) {
      input.kind = InputKind::kInt;
    } else {
      cursor_.fail("leaf, const, state or int");
    }
    if (input.kind != InputKind::kLeaf) input.source = cursor_.take_quoted();
    if (input.kind == InputKind::kInt) {
      if (cursor_.ok() && cursor_.try_take("=")) input.size_of = parse_size_of();
    } else {
      input.dtype = parse_name_in<Dtype>(kDtypeNames, "a dtype");
      input.sizes = parse_sizes(input.kind);
      if (input.kind == InputKind::kConst && cursor_.try_take("digest")) input.digest = cursor_.take_digest();
    }
    if (input.kind == InputKind::kLeaf) leaf_ranks_.emplace(input.value, input.sizes.size());
    if (cursor_.ok()) graph_.inputs.push_back(std::move(input));
  }

  SizeOf parse_size_of() {
    SizeOf size_of;
    size_of.tensor = use();
    cursor_.take(".");
    cursor_.take("size");
    cursor_.take("(");
    size_of.dim = cursor_.take_count(kDimsMax - 1);
    cursor_.take(")");
    if (!cursor_.ok()) return size_of;
    const auto rank = leaf_ranks_.find(size_of.tensor);
    if (rank == leaf_ranks_.end() || size_of.dim >= rank->second) cursor_.fail("a dimension of a leaf before this");
    return size_of;
  }

  std::vector<Dim> parse_sizes(InputKind kind) {
    std::vector<Dim> sizes;
    cursor_.take("[");
    while (cursor_.ok() && !cursor_.try_take("]")) {
      if (!sizes.empty()) cursor_.take(",");
      if (sizes.size() >= kDimsMax)
        cursor_.fail("at most " + std::to_string(kDimsMax) + " dimensions", Errc::kTooLarge);
      if (!cursor_.ok()) break;
      const std::string word = cursor_.take_name();
      if (!cursor_.ok()) break;
      if (word[0] >= '0' && word[0] <= '9') {
        int64_t size = 0;
        const auto [end, failure] = std::from_chars(word.data(), word.data() + word.size(), size);
        if (failure != std::errc() || end != word.data() + word.size()) cursor_.fail("a size in 63 bits before this");
        sizes.emplace_back(size);
      } else {
        if (kind != InputKind::kLeaf) cursor_.fail("a known size before this; only leaves have symbols");
        sizes.emplace_back(word);
      }
    }
    return sizes;
  }

  void parse_node() {
    Node node;
    if (cursor_.peek("%")) {
      // Results are defined after the arguments are read, so that a node cannot use its own result.
      std::vector<std::string> names;
      do {
        cursor_.take("%");
        names.push_back(cursor_.take_name());
        if (names.size() > kListItemsMax) cursor_.fail("fewer results", Errc::kTooLarge);
      } while (cursor_.ok() && cursor_.try_take(","));
      cursor_.take("=");
      parse_call(node);
      for (std::string& name : names) define_result(node, std::move(name));
    } else {
      parse_call(node);
    }
    if (cursor_.ok() && cursor_.try_take("on")) node.on = parse_on_device(node);
    if (cursor_.ok() && cursor_.try_take("group")) {
      node.group = cursor_.take_count(kGroupMax);
      node.label = cursor_.take_quoted();
    }
    if (cursor_.ok() && cursor_.try_take("at")) {
      node.place = cursor_.take_quoted();
      if (cursor_.ok() && node.place.empty()) cursor_.fail("a place that is not empty before this");
    }
    if (cursor_.ok()) graph_.nodes.push_back(std::move(node));
  }

  OnDevice parse_on_device(const Node& node) {
    OnDevice on{.device = parse_device()};
    cursor_.take("[");
    while (cursor_.ok() && !cursor_.try_take("]")) {
      if (!on.operands.empty()) cursor_.take(",");
      OperandForm operand{.is_on_host = cursor_.try_take("cpu")};
      if (!cursor_.try_take("int")) operand.dtype = parse_name_in<Dtype>(kDtypeNames, "a dtype");
      on.operands.push_back(operand);
    }
    size_t operand_count = 0;
    for_each_operand(node, [&](ValueId) { ++operand_count; });
    if (cursor_.ok() && on.operands.size() != operand_count)
      cursor_.fail("a dtype for each of " + std::to_string(operand_count) + " operands before this");
    return on;
  }

  Device parse_device() {
    Device device{cursor_.take_name(), std::nullopt};
    if (cursor_.ok() && cursor_.try_take(":")) device.index = cursor_.take_count(kDeviceIndexMax);
    return device;
  }

  void define_result(Node& node, std::string name) {
    if (!cursor_.ok()) return;
    if (graph_.value_names.size() >= kValuesMax) return cursor_.fail("fewer values", Errc::kTooLarge);
    if (!values_.emplace(name, static_cast<ValueId>(graph_.value_names.size())).second)
      return cursor_.fail("results whose names are not taken yet, not '" + name + "',");
    node.results.push_back(graph_.add_value(std::move(name)));
  }

  void parse_call(Node& node) {
    node.op = cursor_.take_operator();
    cursor_.take("(");
    std::unordered_set<std::string> keywords;
    for (size_t count = 0; cursor_.ok() && !cursor_.try_take(")"); ++count) {
      if (count > 0) cursor_.take(",");
      if (count >= kArgumentsMax)
        cursor_.fail("at most " + std::to_string(kArgumentsMax) + " arguments", Errc::kTooLarge);
      if (!cursor_.ok()) break;
      // A keyword is a name and '='; every literal word is followed by something else.
      Cursor ahead = cursor_;
      std::string name = ahead.take_name();
      if (ahead.ok() && ahead.try_take("=")) {
        cursor_ = ahead;
        if (!keywords.insert(name).second) cursor_.fail("each keyword once");
        node.kwargs.push_back({std::move(name), parse_argument(0)});
      } else {
        if (!node.kwargs.empty()) cursor_.fail("no positional argument after a keyword");
        node.args.push_back(parse_argument(0));
      }
    }
  }

  Argument parse_argument(size_t depth) {
    if (!cursor_.ok()) return {};
    if (cursor_.peek("%")) return {ValueRef{use()}};
    if (cursor_.peek("\"")) return {cursor_.take_quoted()};
    if (cursor_.try_take("[")) return {parse_list(depth + 1)};
    if (cursor_.try_take("none")) return {None{}};
    if (cursor_.try_take("true")) return {true};
    if (cursor_.try_take("false")) return {false};
    if (cursor_.try_take("dtype:")) return {parse_name_in<Dtype>(kDtypeNames, "a dtype")};
    if (cursor_.try_take("layout:")) return {parse_name_in<Layout>(kLayoutNames, "a layout")};
    if (cursor_.try_take("memory_format:")) return {parse_name_in<MemoryFormat>(kMemoryFormatNames, "a memory format")};
    if (cursor_.try_take("device:")) return {parse_device()};
    return parse_number();
  }

  Argument::List parse_list(size_t depth) {
    Argument::List list;
    if (depth > kListDepthMax)
      cursor_.fail("lists nested no deeper than " + std::to_string(kListDepthMax), Errc::kTooLarge);
    while (cursor_.ok() && !cursor_.try_take("]")) {
      if (!list.empty()) cursor_.take(",");
      if (list.size() >= kListItemsMax) cursor_.fail("a shorter list", Errc::kTooLarge);
      if (cursor_.ok()) list.push_back(parse_argument(depth));
    }
    return list;
  }

  Argument parse_number() {
    const std::string_view number = cursor_.take_number();
    const char* begin = number.data();
    const char* end = begin + number.size();
    int64_t integer = 0;
    if (const auto read = std::from_chars(begin, end, integer); !number.empty() && read.ptr == end) {
      if (read.ec == std::errc()) return {integer};
      cursor_.fail("an integer in 64 bits before this");
      return {};
    }
    double real = 0;
    const auto read = std::from_chars(begin, end, real);
    const bool is_word = number == "inf" || number == "-inf" || number == "nan";
    const bool has_digits = number.find_first_of("0123456789") != std::string_view::npos;
    if (number.empty() || read.ptr != end || read.ec != std::errc() || !(is_word || has_digits)) {
      cursor_.fail("an argument before this");
      return {};
    }
    return {Real(real)};
  }

  template <typename Enum, size_t count>
  Enum parse_name_in(const std::array<std::string_view, count>& names, std::string_view what) {
    const std::string name = cursor_.take_name();
    const auto value = name_in<Enum>(names, name);
    if (cursor_.ok() && !value) cursor_.fail(std::string(what) + " before this, not '" + name + "',");
    return value.value_or(Enum{});
  }

  void parse_output() {
    cursor_.take("output");
    Output output;
    output.value = use();
    if (cursor_.ok() && cursor_.try_take("key")) output.key = cursor_.take_digest();
    if (cursor_.ok()) graph_.outputs.push_back(std::move(output));
  }

  Cursor cursor_;
  Graph graph_;
  Part part_ = Part::kInputs;
  std::unordered_map<std::string, ValueId> values_;
  std::unordered_set<uint32_t> leaf_indices_;
  std::unordered_map<ValueId, size_t> leaf_ranks_;
};

}  // namespace

Result<Graph> parse_graph(std::string_view text) {
  if (text.size() > kTextBytesMax)
    return Fault{Errc::kTooLarge, "the graph's text has " + std::to_string(text.size()) +
                                      " bytes, but must have at most " + std::to_string(kTextBytesMax) +
                                      "; capture a smaller program"};
  return Parser(text).parse();
}

}  // namespace penstock::graph
