#include "switches.h"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace metalcore::simulator {

bool switched_on(const char* variable) {
  const char* given = std::getenv(variable);
  std::string text = given ? given : "";
  for (char& c : text)  // tolower depends on the locale
    if (c >= 'A' && c <= 'Z') c += 'a' - 'A';
  const auto is_one_of = [&](std::initializer_list<const char*> texts) {
    return std::find(texts.begin(), texts.end(), text) != texts.end();
  };
  if (is_one_of({"1", "on", "yes", "true"})) return true;
  if (is_one_of({"", "0", "off", "no", "false"})) return false;
  throw std::invalid_argument("metalcore: " + std::string(variable) +
                              " must be 1, on, yes or true, or 0, off, no or false, got '" + given + "'");
}

}  // namespace metalcore::simulator
