#include "json.h"

#include <charconv>
#include <stdexcept>
#include <utility>

namespace metalcore::c_api {
namespace {

constexpr int kDeepest = 32;

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  Json whole() {
    Json value = read(0);
    if (skip_spaces(); at_ != text_.size()) fail("more text");
    return value;
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw std::runtime_error("metalcore: " + std::string(what) + " at byte " + std::to_string(at_) +
                             " of a JSON file among the kernels");
  }

  void skip_spaces() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
  }

  char next() {
    if (at_ == text_.size()) fail("an end");
    return text_[at_++];
  }

  bool take(char wanted) {
    skip_spaces();
    if (at_ == text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }

  Json read(int depth) {
    if (depth > kDeepest) fail("too deep a value");
    Json value;
    if (take('"')) {
      value.text = string();
    } else if (take('[')) {
      for (bool first = true; !take(']'); first = false) {
        if (!first && !take(',')) fail("no comma");
        value.items.push_back(read(depth + 1));
      }
    } else if (take('{')) {
      for (bool first = true; !take('}'); first = false) {
        if ((!first && !take(',')) || !take('"')) fail("no key");
        value.keys.push_back(string());
        if (!take(':')) fail("no colon");
        value.items.push_back(read(depth + 1));
      }
    } else {
      const char* const end = text_.data() + text_.size();
      const auto [behind, error] = std::from_chars(text_.data() + at_, end, value.number);
      if (error != std::errc()) fail("no value");
      at_ = static_cast<size_t>(behind - text_.data());
    }
    return value;
  }

  // Behind its first quote.
  std::string string() {
    std::string found;
    for (char c = next(); c != '"'; c = next()) found += c == '\\' ? escaped() : c;
    return found;
  }

  // Kernels' declarations are ASCII.
  char escaped() {
    constexpr std::string_view kEscapes = "\"\\/bfnrt", kCharacters = "\"\\/\b\f\n\r\t";
    const size_t which = kEscapes.find(next());
    if (which == std::string_view::npos) fail("an escape that is not read");
    return kCharacters[which];
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

Json Json::parse(std::string_view text) { return Reader(text).whole(); }

const Json& Json::at(std::string_view key) const {
  for (size_t i = 0; i < keys.size(); ++i)
    if (keys[i] == key) return items[i];
  throw std::runtime_error("metalcore: a JSON file among the kernels has no '" + std::string(key) + "'");
}

}  // namespace metalcore::c_api
