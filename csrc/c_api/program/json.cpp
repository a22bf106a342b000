#include "json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <stdexcept>

#include <locale.h>
#include <stdlib.h>
#ifdef __APPLE__
#include <xlocale.h>
#endif

namespace metalcore::c_api {
namespace {

constexpr int kDeepest = 32;

// A number with a decimal point, whatever the process's locale has in its place.
double fraction_of(const std::string& digits) {
  static const locale_t kPlain = newlocale(LC_ALL_MASK, "C", nullptr);
  return strtod_l(digits.c_str(), nullptr, kPlain);
}

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
    throw std::runtime_error(std::string(what) + " at byte " + std::to_string(at_) + " of the JSON");
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
      value.kind = Json::Kind::kString;
      value.text = string();
    } else if (take('[')) {
      value.kind = Json::Kind::kArray;
      for (bool first = true; !take(']'); first = false) {
        if (!first && !take(',')) fail("no comma");
        value.items.push_back(read(depth + 1));
      }
    } else if (take('{')) {
      value.kind = Json::Kind::kObject;
      for (bool first = true; !take('}'); first = false) {
        if ((!first && !take(',')) || !take('"')) fail("no key");
        value.keys.push_back(string());
        if (!take(':')) fail("no colon");
        value.items.push_back(read(depth + 1));
      }
      require_unique(value.keys);
    } else if (!take_word(value)) {
      value.kind = Json::Kind::kNumber;
      read_number(value);
    }
    return value;
  }

  bool take_word(Json& value) {
    struct Word {
      std::string_view word;
      Json::Kind kind;
      int64_t number;
    };
    constexpr Word kWords[] = {
        {"null", Json::Kind::kNull, 0}, {"false", Json::Kind::kBool, 0}, {"true", Json::Kind::kBool, 1}};
    for (const auto& [word, kind, number] : kWords) {
      if (text_.substr(at_, word.size()) != word) continue;
      at_ += word.size();
      value.kind = kind;
      value.number = number;
      return true;
    }
    return false;
  }

  void read_number(Json& value) {
    const size_t begin = at_;
    const auto digits = [&] {
      const size_t first = at_;
      while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
      if (at_ == first) fail("no value");
      return first;
    };
    const auto has = [&](std::string_view any) {
      return at_ < text_.size() && any.find(text_[at_]) != std::string_view::npos && ++at_;
    };
    has("-");
    if (const size_t first = digits(); text_[first] == '0' && at_ - first > 1) fail("a number with zeros in front");
    value.is_whole = true;
    if (has(".")) digits(), value.is_whole = false;
    if (has("eE")) has("+-"), digits(), value.is_whole = false;
    const std::string token(text_.substr(begin, at_ - begin));
    const char* const end = token.data() + token.size();
    if (value.is_whole && std::from_chars(token.data(), end, value.number).ec != std::errc())
      fail("too large a number");
    value.fraction = fraction_of(token);
    if (!std::isfinite(value.fraction)) fail("no finite number");
  }

  void require_unique(const std::vector<std::string>& keys) const {
    std::vector<std::string_view> sorted(keys.begin(), keys.end());
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) fail("a name that is there twice");
  }

  // Reads a string from behind its first quote on.
  std::string string() {
    std::string found;
    for (char c = next(); c != '"'; c = next()) {
      if (static_cast<unsigned char>(c) < ' ') fail("a control character in a string");
      if (c == '\\')
        append_escaped(found);
      else
        found += c;
    }
    return found;
  }

  void append_escaped(std::string& found) {
    constexpr std::string_view kEscapes = "\"\\/bfnrt", kCharacters = "\"\\/\b\f\n\r\t";
    const char escape = next();
    if (escape == 'u') return append_utf8(found, code_point());
    const size_t which = kEscapes.find(escape);
    if (which == std::string_view::npos) fail("an unknown escape");
    found += kCharacters[which];
  }

  uint32_t unit() {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) {
      const char digit = next();
      const size_t which = std::string_view("0123456789abcdef").find(static_cast<char>(digit | 0x20));
      if (which == std::string_view::npos || digit < '0') fail("no four hexadecimal digits");
      value = value << 4 | static_cast<uint32_t>(which);
    }
    return value;
  }

  uint32_t code_point() {
    const uint32_t first = unit();
    if (first < 0xd800 || first > 0xdfff) return first;
    if (first > 0xdbff || next() != '\\' || next() != 'u') fail("half of a surrogate pair");
    const uint32_t second = unit();
    if (second < 0xdc00 || second > 0xdfff) fail("half of a surrogate pair");
    return 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
  }

  static void append_utf8(std::string& text, uint32_t code) {
    const auto tail = [&](int shift) { text += static_cast<char>(0x80 | (code >> shift & 0x3f)); };
    if (code < 0x80) {
      text += static_cast<char>(code);
    } else if (code < 0x800) {
      text += static_cast<char>(0xc0 | code >> 6), tail(0);
    } else if (code < 0x10000) {
      text += static_cast<char>(0xe0 | code >> 12), tail(6), tail(0);
    } else {
      text += static_cast<char>(0xf0 | code >> 18), tail(12), tail(6), tail(0);
    }
  }

  std::string_view text_;
  size_t at_ = 0;
};

const Json& require(const Json& value, Json::Kind kind, const char* what) {
  if (value.kind != kind) throw std::runtime_error(std::string("something in the JSON should be ") + what);
  return value;
}

}  // namespace

Json Json::parse(std::string_view text) { return Reader(text).whole(); }

const Json* Json::find(std::string_view key) const {
  const auto found = std::find(object().keys.begin(), keys.end(), key);
  return found == keys.end() ? nullptr : &items[static_cast<size_t>(found - keys.begin())];
}

const Json& Json::at(std::string_view key) const {
  if (const Json* found = find(key)) return *found;
  throw std::runtime_error("an object of the JSON has no '" + std::string(key) + "'");
}

const std::string& Json::string() const { return require(*this, Kind::kString, "a text").text; }
const std::vector<Json>& Json::array() const { return require(*this, Kind::kArray, "a list").items; }
const Json& Json::object() const { return require(*this, Kind::kObject, "an object"); }

double Json::real() const { return require(*this, Kind::kNumber, "a number").fraction; }

int64_t Json::whole() const {
  if (!require(*this, Kind::kNumber, "a number").is_whole)
    throw std::runtime_error("something should be a whole number");
  return number;
}

uint64_t Json::size(uint64_t most) const {
  whole();
  if (number < 0 || static_cast<uint64_t>(number) > most)
    throw std::runtime_error("a number of the JSON is " + std::to_string(number) + ", and must be from 0 to " +
                             std::to_string(most));
  return static_cast<uint64_t>(number);
}

}  // namespace metalcore::c_api
