#include "weights.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace metalcore::c_api {
namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 48;
constexpr size_t kMostDimensions = 64;

[[noreturn]] void refuse(const std::string& reason) { throw std::runtime_error(reason); }

// Whether each element has its own place, and no places are between them.
bool is_dense(const Array& array) {
  std::vector<size_t> order(array.sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return array.strides[a] < array.strides[b]; });
  int64_t expected = 1;
  for (const size_t d : order) {
    if (array.sizes[d] == 1) continue;
    if (array.strides[d] != expected) return false;
    expected *= array.sizes[d];
  }
  return true;
}

// Puts elements that are in the order of rows where the array's own strides say.
std::string placed(const Array& array, const std::string& rows) {
  const size_t item = array.dtype->size;
  std::string result(array.bytes, '\0');
  std::vector<int64_t> at(array.sizes.size(), 0);
  size_t place = 0;
  for (size_t i = 0; i < array.bytes; i += item) {
    std::memcpy(result.data() + place * item, rows.data() + i, item);
    for (size_t d = at.size(); d-- > 0;) {
      place += static_cast<size_t>(array.strides[d]);
      if (++at[d] < array.sizes[d]) break;
      place -= static_cast<size_t>(array.strides[d] * array.sizes[d]);
      at[d] = 0;
    }
  }
  return result;
}

std::string made_rows(const Array& constant, const Container& file, const Container* weights, const Json& recipe) {
  if (recipe.kind == Json::Kind::kNull) refuse("there is no recipe for '" + constant.name + "'");
  const Recipe::Made made = Recipe(recipe, file, weights).make(constant.name);
  if (made.sizes != constant.sizes || !constant.dtype->is_float)
    refuse("the recipe makes another '" + constant.name + "' than the program needs");
  const std::vector<float> numbers(made.numbers.begin(), made.numbers.end());
  std::string rows(constant.bytes, '\0');
  convert(numbers.data(), *dtype_named("float32"), rows.data(), *constant.dtype, numbers.size());
  return rows;
}

}  // namespace

Array read_array(const Json& described, const char* name) {
  Array array;
  array.name = described.at(name).string();
  array.dtype = dtype_named(described.at("dtype").string());
  if (!array.dtype) refuse("'" + array.name + "' has an unknown dtype");
  const std::vector<Json>& shape = described.at("shape").array();
  if (shape.size() > kMostDimensions) refuse("'" + array.name + "' has too many dimensions");
  uint64_t bytes = array.dtype->size, whole = 1;
  bool empty = false;
  for (const Json& size : shape) {
    array.sizes.push_back(static_cast<int64_t>(size.size(kMostBytes)));
    empty |= array.sizes.back() == 0;
    if (__builtin_mul_overflow(whole, std::max<uint64_t>(size.size(), 1), &whole) || whole > kMostBytes)
      refuse("'" + array.name + "' has no possible shape");
  }
  array.bytes = empty ? 0 : bytes * whole;
  if (const Json* strides = described.find("strides")) {
    for (const Json& stride : strides->array()) array.strides.push_back(static_cast<int64_t>(stride.size(kMostBytes)));
    if (array.strides.size() != array.sizes.size() || (!empty && !is_dense(array)))
      refuse("'" + array.name + "' has no possible strides");
  } else {
    array.strides.assign(array.sizes.size(), 1);
    for (size_t d = array.sizes.size(); d-- > 1;)
      array.strides[d - 1] = array.strides[d] * std::max<int64_t>(array.sizes[d], 1);
  }
  if (const Json* names = described.find("names"))
    for (const Json& known : names->array()) array.names.push_back(known.string());
  if (const Json* made = described.find("made")) array.is_made = made->kind == Json::Kind::kBool && made->number != 0;
  return array;
}

std::string read_rows(const Array& array, const Container& file, const Container* weights) {
  const Container* source = &file;
  const Entry* entry = nullptr;
  if (array.names.empty()) {
    entry = file.entry(array.name);
  } else {
    if (!weights) file.fail("the program's weights are apart, and neither given nor beside it");
    source = weights;
    for (const std::string& name : array.names)
      if (!entry) entry = weights->entry(name);
  }
  if (!entry) source->fail("it has no tensor '" + array.name + "'");
  if (entry->shape != array.sizes || !entry->dtype ||
      (entry->dtype != array.dtype && !(entry->dtype->is_float && array.dtype->is_float)))
    source->fail("the shape or the dtype of '" + array.name + "' is another one than the program needs");
  std::string read = source->read(*entry);
  if (entry->dtype == array.dtype) return read;
  std::string rows(array.bytes, '\0');
  convert(read.data(), *entry->dtype, rows.data(), *array.dtype, array.bytes / array.dtype->size);
  return rows;
}

std::string read_constant(const Array& constant, const Container& file, const Container* weights, const Json& recipe) {
  return placed(constant,
                constant.is_made ? made_rows(constant, file, weights, recipe) : read_rows(constant, file, weights));
}

}  // namespace metalcore::c_api
