// Arrays that a program's file describes, and the tensors of files that they are.
#pragma once

#include "container.h"
#include "json.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace metalcore::c_api {

// How constants of a program are made of the weights that lie apart: they are permuted, padded, cast, and folded with
// batch norms. metalcore/programs/passes/folding.py makes the recipe, and PyTorch follows it for Python.
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

// An input, an output, a constant, or a parameter of which the recipe makes constants.
struct Array {
  std::string name;
  const Dtype* dtype;
  std::vector<int64_t> sizes, strides;
  size_t bytes;
  std::vector<std::string> names;  // what it may be called in the weights; none where it is in the program's file
  bool is_made = false;            // by the recipe
};

// `name` is the key of the array's name. Throws std::runtime_error where the array is impossible.
Array read_array(const Json& described, const char* name);

// The numbers of a tensor in the order of rows, in the array's dtype. Throws Error.
std::string read_rows(const Array& array, const Container& file, const Container* weights);

// The bytes of a constant as they lie in memory. The recipe is the manifest's. Throws Error, or std::runtime_error.
std::string read_constant(const Array& constant, const Container& file, const Container* weights, const Json& recipe);

}  // namespace metalcore::c_api
