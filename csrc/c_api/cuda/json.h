// A reader of JSON, for the files that the build writes beside the kernels' programs.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace metalcore::c_api {

struct Json {
  double number = 0;              // of a number
  std::string text;               // of a string
  std::vector<Json> items;        // of an array or an object
  std::vector<std::string> keys;  // of an object: those of the items

  // Throws std::runtime_error where the text is not JSON, or has true, false or null, which no file of ours has.
  static Json parse(std::string_view text);

  // Of an object. Throws std::runtime_error where there is none.
  const Json& at(std::string_view key) const;
};

}  // namespace metalcore::c_api
