// SPDX-License-Identifier: Apache-2.0
#include "ir_text_edit.h"

#include <unordered_set>
#include <utility>

#include "graph/ir_text.h"

namespace penstock::fuzz {
namespace {

using Line = std::vector<std::string>;  // its words

bool is_word_char(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
         std::string_view("_.:%+-").find(c) != std::string_view::npos;
}

// Quoted texts, words, and every other character alone; blanks are left out.
Line words_of(std::string_view line) {
  Line words;
  for (size_t place = 0; place < line.size();) {
    size_t end = place + 1;
    if (line[place] == '"') {
      while (end < line.size() && line[end] != '"') end += line[end] == '\\' ? 2 : 1;
      end = std::min(end + 1, line.size());
    } else if (is_word_char(line[place])) {
      while (end < line.size() && is_word_char(line[end])) ++end;
    }
    if (line[place] != ' ') words.emplace_back(line.substr(place, end - place));
    place = end;
  }
  return words;
}

std::vector<Line> lines_of(std::string_view text) {
  std::vector<Line> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    if (Line words = words_of(text.substr(0, end)); !words.empty()) lines.push_back(std::move(words));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

std::string some_word(Choices& choices) {
  static const Line words = words_of(
      "none true false 0 -1 7 9223372036854775807 -9223372036854775808 9223372036854775808 1.5 -0.0 1e-05 1e22 1e400 "
      "5e-324 inf -inf nan \"\" \"a\\\"\\\\\\n\\x7f\" \"0123456789abcdef0123456789abcdef\" dtype:float32 dtype:bool "
      "layout:strided layout:_mkldnn memory_format:channels_last device:cpu device:cuda:1 int64 uint8 s0 s1 [ ] ( ) , "
      "= "
      "group at key digest %x0 %v1 %x0.size aten::add.Tensor aten::to.dtype copy input output leaf const state int");
  return words[choices.below(words.size())];
}

std::string some_line(Choices& choices) {
  return choices.one_of<const char*>(
      {"input %x0 leaf 0 uint8 [s0, 3, 4]", "input %x1 leaf 1 float32 []", "input %n int \"n\" = %x0.size(1)",
       "input %m int \"m\"", "input %c const \"c\" float32 [1, 3] digest \"0123456789abcdef0123456789abcdef\"",
       "input %p state \"w\" bfloat16 [2]", "%a = aten::add.Tensor(%x0, 1, alpha=2) group 1 \"g\" at \"m.py:1\"",
       "%a, %b = aten::max.dim(%x0, -1, [[1], [%x0, none]])", "aten::f(dtype=dtype:int64, device=device:cuda:0)",
       "output %x0 key \"fedcba9876543210fedcba9876543210\"", "output %x0"});
}

enum class Part : uint8_t { kInput, kNode, kOutput };

Part part_of(const Line& line) {
  if (line[0] == "input") return Part::kInput;
  return line[0] == "output" ? Part::kOutput : Part::kNode;
}

// Indices of the words that define values: behind `input`, or the results in front of '='.
std::vector<size_t> definitions(const Line& line) {
  std::vector<size_t> found;
  const Part part = part_of(line);
  if (part == Part::kInput && line.size() > 1) found.push_back(1);
  if (part != Part::kNode || line[0][0] != '%') return found;
  for (size_t index = 0; index < line.size() && line[index] != "="; ++index) {
    if (line[index][0] == '%') found.push_back(index);
  }
  return found;
}

void edit_line(Line& line, const std::vector<Line>& lines, Choices& choices) {
  const size_t place = choices.below(line.size());
  const Line& other = lines[choices.below(lines.size())];
  switch (choices.below(7)) {
    case 0: line[place] = some_word(choices); break;
    case 1: line[place] = other[choices.below(other.size())]; break;
    case 2: line.insert(line.begin() + static_cast<ptrdiff_t>(place), some_word(choices)); break;
    case 3: line.insert(line.begin() + static_cast<ptrdiff_t>(place), {some_word(choices), ","}); break;
    case 4:  // more than there may be, now and then
      for (size_t count = choices.below(9); count > 0; --count) {
        line.insert(line.begin() + static_cast<ptrdiff_t>(place), {line[place], ","});
      }
      break;
    case 5:  // into a list
      line.insert(line.begin() + static_cast<ptrdiff_t>(place) + 1, "]");
      line.insert(line.begin() + static_cast<ptrdiff_t>(place), "[");
      break;
    default: line.erase(line.begin() + static_cast<ptrdiff_t>(place)); break;
  }
}

void edit_lines(std::vector<Line>& lines, Choices& choices) {
  const size_t place = choices.below(lines.size());
  const auto there = lines.begin() + static_cast<ptrdiff_t>(place);
  switch (choices.below(10)) {
    case 0: lines.erase(there); break;
    case 1: lines.push_back(lines[place]); break;
    case 2: std::swap(lines[place], lines[choices.below(lines.size())]); break;
    case 3:
    case 4: lines.insert(there, words_of(some_line(choices))); break;
    default: edit_line(lines[place], lines, choices); break;
  }
  std::erase_if(lines, [](const Line& line) { return line.empty(); });
}

// Names taken twice get new ones, and uses of values that are not there become uses of some that are.
void repair_values(std::vector<Line>& lines, Choices& choices) {
  std::vector<std::string> defined;
  std::unordered_set<std::string> taken;
  size_t new_count = 0;
  for (Line& line : lines) {
    const auto defining = definitions(line);
    for (size_t index = 0; index < line.size(); ++index) {
      std::string& word = line[index];
      if (word[0] != '%' || std::ranges::find(defining, index) != defining.end() || defined.empty()) continue;
      const size_t end = std::min(word.find('.'), word.size());
      if (!taken.contains(word.substr(0, end)) && choices.mostly()) {
        word = defined[choices.below(defined.size())] + word.substr(end);
      }
    }
    for (const size_t index : defining) {
      std::string& word = line[index];
      if ((taken.contains(word) || word[0] != '%') && choices.mostly()) {
        do word = "%v" + std::to_string(new_count++);
        while (taken.contains(word));
      }
      taken.insert(word);
      defined.push_back(word);
    }
  }
}

// Takes lines of a part away while there are more of them than its cap.
void repair_count(std::vector<Line>& lines, Part part, size_t most, Choices& choices) {
  std::vector<size_t> places;
  for (size_t index = 0; index < lines.size(); ++index) {
    if (part_of(lines[index]) == part) places.push_back(index);
  }
  for (; places.size() > most && choices.mostly(); places.pop_back()) {
    lines.erase(lines.begin() + static_cast<ptrdiff_t>(places.back()));
  }
}

}  // namespace

std::string edit_ir_text(std::string_view text, Choices& choices) {
  std::vector<Line> lines = lines_of(text);
  if (!lines.empty() && lines[0][0] == "penstock-ir" && choices.mostly()) lines.erase(lines.begin());
  for (size_t edit = 1 + choices.below(3); edit > 0; --edit) {
    if (lines.empty()) lines.push_back(words_of(some_line(choices)));
    edit_lines(lines, choices);
  }
  if (choices.mostly()) std::ranges::stable_sort(lines, {}, part_of);
  repair_count(lines, Part::kInput, graph::kInputsMax, choices);
  repair_count(lines, Part::kNode, graph::kNodesMax, choices);
  repair_count(lines, Part::kOutput, graph::kInputsMax, choices);
  if (choices.mostly()) repair_values(lines, choices);
  std::string edited = choices.mostly() ? "penstock-ir 1\n" : "";
  for (const Line& line : lines) {
    for (const std::string& word : line) edited += word + ' ';
    edited.back() = '\n';
  }
  return edited;
}

}  // namespace penstock::fuzz
