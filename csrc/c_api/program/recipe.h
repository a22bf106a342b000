// How constants of a program are made of the weights that lie apart: they are permuted, padded, cast, and folded with
// batch norms. metalcore/programs/passes/folding.py makes the recipe, and PyTorch follows it for Python.
#pragma once

#include "container.h"
#include "json.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace metalcore::c_api {

class Recipe {
 public:
  // `described` is the manifest's. Throws std::runtime_error, as all functions here do, for what is not known.
  Recipe(const Json& described, const Container& file, const Container* weights);

  // The numbers of a constant in the order of rows, and its shape.
  struct Made {
    std::vector<int64_t> sizes;
    std::vector<double> numbers;
  };
  Made make(const std::string& constant) const;

 private:
  struct Value;
  using Values = std::map<std::string, Value, std::less<>>;
  struct Step;

  Value parameter(const Json& described) const;

  const Json& described_;
  const Container& file_;
  const Container* const weights_;
};

}  // namespace metalcore::c_api
