// A reader of JSON for the files that the build writes beside the kernels' programs, and for programs' files, which
// may come from strangers. It is strict: names do not repeat. It is ours since the library has to build from what pip
// brings, on Macs too, and no package on PyPI holds the headers of a kept one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace metalcore::c_api {

struct Json {
  enum class Kind : uint8_t { kNull, kBool, kNumber, kString, kArray, kObject };
  Kind kind = Kind::kNull;
  int64_t number = 0;   // of a whole number; 0 or 1 of false or true
  double fraction = 0;  // of any number
  bool is_whole = false;
  std::string text;               // of a string, in UTF-8
  std::vector<Json> items;        // of an array or an object
  std::vector<std::string> keys;  // of an object: those of the items

  // Throws std::runtime_error where the text is not such JSON.
  static Json parse(std::string_view text);

  // These throw std::runtime_error where the value is of another kind, or has no such key.
  const Json& at(std::string_view key) const;
  const std::string& string() const;
  const std::vector<Json>& array() const;
  const Json& object() const;
  uint64_t size(uint64_t most = INT64_MAX) const;  // a whole number from 0 to `most`
  int64_t whole() const;
  double real() const;

  const Json* find(std::string_view key) const;  // of an object; nullptr where there is none
};

}  // namespace metalcore::c_api
