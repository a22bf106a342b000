#include "weights.h"

#include "container.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <stdexcept>
#include <utility>

namespace metalcore::c_api {
namespace {

using Sizes = std::vector<int64_t>;

constexpr int64_t kGrowth = 8, kSmall = 1 << 16;  // an operation makes no more elements than this of its arguments'

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error("the recipe: " + what); }

int64_t count_of(const Sizes& sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes)
    if (size < 0 || __builtin_mul_overflow(count, size, &count)) refuse("no possible shape");
  return count;
}

const std::string* value_name(const Json& argument) {
  const Json* name = argument.kind == Json::Kind::kObject ? argument.find("value") : nullptr;
  return name ? &name->string() : nullptr;
}

double round_to(double number, const std::string& dtype) {
  if (dtype == "float64") return number;
  const Dtype *float32 = dtype_named("float32"), *wanted = dtype_named(dtype);
  const auto single = static_cast<float>(number);
  if (wanted == float32) return single;
  unsigned char bits[4];
  float rounded = 0;
  convert(&single, *float32, bits, *wanted, 1);
  convert(bits, *wanted, &rounded, *float32, 1);
  return rounded;
}

void require_float(const std::string& dtype) {
  const Dtype* known = dtype_named(dtype);
  if (dtype != "float64" && !(known && known->is_float)) refuse("numbers of " + dtype.substr(0, 40));
}

size_t dimension(int64_t d, size_t dims) {
  const auto count = static_cast<int64_t>(dims);
  if (d < -count || d >= count) refuse("a dimension that is not there");
  return static_cast<size_t>(d < 0 ? d + count : d);
}

}  // namespace

// A tensor that a step of the recipe takes or makes: its numbers in the order of rows.
struct Recipe::Value {
  std::string dtype;
  Sizes sizes;
  std::vector<double> numbers;

  void round() {
    if (dtype != "float64")
      for (double& number : numbers) number = round_to(number, dtype);
  }
};

// One operation, and what its arguments are.
struct Recipe::Step {
  const Json& described;
  const Values& values;

  const std::vector<Json>& arguments() const { return described.at("arguments").array(); }
  const Json& argument(size_t i) const {
    if (i >= arguments().size()) refuse("an argument is missing");
    return arguments()[i];
  }
  const Value& value(size_t i) const {
    const std::string* name = value_name(argument(i));
    const auto found = name ? values.find(*name) : values.end();
    if (found == values.end()) refuse("a value that was not made before");
    return found->second;
  }
  Sizes whole_numbers(size_t i) const {
    Sizes numbers;
    for (const Json& one : argument(i).array()) numbers.push_back(one.whole());
    return numbers;
  }

  // Element i of the result is element place(i's position) of the value: for operations that move elements.
  template <typename Place>
  static Value moved(const Value& from, Sizes sizes, const Place& place) {
    Value made = {from.dtype, std::move(sizes), {}};
    Sizes at(made.sizes.size(), 0);
    const int64_t count = count_of(made.sizes);
    made.numbers.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      made.numbers.push_back(place(at));
      for (size_t d = at.size(); d-- > 0;) {
        if (++at[d] < made.sizes[d]) break;
        at[d] = 0;
      }
    }
    return made;
  }

  static Sizes strides_of(const Sizes& sizes) {
    Sizes strides(sizes.size(), 1);
    for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * sizes[d];
    return strides;
  }

  Value permuted(const Sizes& order) const {
    const Value& from = value(0);
    const Sizes strides = strides_of(from.sizes);
    Sizes sizes, steps;
    std::set<size_t> seen;
    for (const int64_t d : order) {
      const size_t source = dimension(d, from.sizes.size());
      if (!seen.insert(source).second) refuse("a dimension twice");
      sizes.push_back(from.sizes[source]), steps.push_back(strides[source]);
    }
    if (sizes.size() != from.sizes.size()) refuse("a permutation of fewer dimensions");
    return moved(from, sizes, [&](const Sizes& at) {
      int64_t place = 0;
      for (size_t d = 0; d < at.size(); ++d) place += at[d] * steps[d];
      return from.numbers[static_cast<size_t>(place)];
    });
  }

  Value viewed() const {
    Value made = value(0);
    Sizes sizes = whole_numbers(1);
    int64_t known = 1;
    for (const int64_t size : sizes)
      if (size != -1 && (size < 0 || __builtin_mul_overflow(known, size, &known))) refuse("no possible shape");
    const auto count = static_cast<int64_t>(made.numbers.size());
    for (int64_t& size : sizes)
      if (size == -1) size = known ? count / known : 0, known *= size;
    if (count_of(sizes) != count) refuse("a view of another size");
    made.sizes = sizes;
    return made;
  }

  Value unsqueezed() const {
    Value made = value(0);
    const size_t d = dimension(argument(1).whole(), made.sizes.size() + 1);
    made.sizes.insert(made.sizes.begin() + static_cast<std::ptrdiff_t>(d), 1);
    return made;
  }

  // Pairs from the last dimension on: elements before it, and behind it.
  Value padded() const {
    const Value& from = value(0);
    const Sizes pads = whole_numbers(1), strides = strides_of(from.sizes);
    const double filled = arguments().size() > 2 ? argument(2).real() : 0;
    Sizes sizes = from.sizes, before(sizes.size(), 0);
    if (pads.size() % 2 || pads.size() / 2 > sizes.size()) refuse("no possible padding");
    for (size_t i = 0; i < pads.size() / 2; ++i) {
      const size_t d = sizes.size() - 1 - i;
      if (pads[2 * i] < 0 || pads[2 * i + 1] < 0 || pads[2 * i] > kSmall || pads[2 * i + 1] > kSmall)
        refuse("no possible padding");
      sizes[d] += pads[2 * i] + pads[2 * i + 1], before[d] = pads[2 * i];
    }
    require_growth(count_of(sizes), count_of(from.sizes));
    return moved(from, sizes, [&](const Sizes& at) {
      int64_t place = 0;
      for (size_t d = 0; d < at.size(); ++d) {
        const int64_t i = at[d] - before[d];
        if (i < 0 || i >= from.sizes[d]) return filled;
        place += i * strides[d];
      }
      return from.numbers[static_cast<size_t>(place)];
    });
  }

  Value cast() const {
    Value made = value(0);
    if (const Json* dtype = described.at("options").find("dtype")) made.dtype = dtype->at("dtype").string();
    require_float(made.dtype);
    made.round();
    return made;
  }

  template <typename Function>
  Value each(const Function& function) const {
    Value made = value(0);
    for (double& number : made.numbers) number = function(number);
    made.round();
    return made;
  }

  template <typename Function>
  Value both(const Function& function) const {
    if (arguments().size() != 2 || !described.at("options").keys.empty()) refuse("an option that is not known");
    if (!value_name(argument(1)))
      return each([&, number = argument(1).real()](double other) { return function(other, number); });
    const Value &a = value(0), &b = value(1);
    if (a.dtype != b.dtype) refuse("an operation on two dtypes");
    const size_t dims = std::max(a.sizes.size(), b.sizes.size());
    Sizes sizes(dims, 1), a_steps(dims, 0), b_steps(dims, 0);
    const auto broadcast = [&](const Value& one, Sizes& steps) {
      const Sizes strides = strides_of(one.sizes);
      for (size_t i = 0; i < one.sizes.size(); ++i) {
        const size_t d = dims - one.sizes.size() + i;
        if (one.sizes[i] == 1) continue;
        if (sizes[d] != 1 && sizes[d] != one.sizes[i]) refuse("shapes that do not go together");
        sizes[d] = one.sizes[i], steps[d] = strides[i];
      }
    };
    broadcast(a, a_steps), broadcast(b, b_steps);
    require_growth(count_of(sizes), count_of(a.sizes) + count_of(b.sizes));
    Value made = moved(a, sizes, [&](const Sizes& at) {
      int64_t left = 0, right = 0;
      for (size_t d = 0; d < dims; ++d) left += at[d] * a_steps[d], right += at[d] * b_steps[d];
      return function(a.numbers[static_cast<size_t>(left)], b.numbers[static_cast<size_t>(right)]);
    });
    made.round();
    return made;
  }

  static void require_growth(int64_t made, int64_t given) {
    if (made > std::max(kGrowth * given, kSmall)) refuse("it makes far more than it is made of");
  }

  Value run() const {
    const std::string& name = described.at("operator").string();
    if (name == "aten::_to_copy") return cast();
    if (name == "aten::clone") return value(0);
    if (name == "aten::permute") return permuted(whole_numbers(1));
    if (name == "aten::view" || name == "aten::reshape" || name == "aten::_unsafe_view") return viewed();
    if (name == "aten::unsqueeze") return unsqueezed();
    if (name == "aten::constant_pad_nd") return padded();
    if (name == "aten::rsqrt") return each([](double x) { return 1 / std::sqrt(x); });
    if (name == "aten::add.Tensor") return both([](double a, double b) { return a + b; });
    if (name == "aten::sub.Tensor") return both([](double a, double b) { return a - b; });
    if (name == "aten::mul.Tensor") return both([](double a, double b) { return a * b; });
    if (name == "aten::div.Tensor") return both([](double a, double b) { return a / b; });
    if (name == "aten::rsub.Scalar") return both([](double a, double b) { return b - a; });
    refuse("this library has no " + name.substr(0, 80) + ": save the program with weights='inside'");
  }
};

Recipe::Recipe(const Json& described, const Container& file, const Container* weights)
    : described_(described.object()), file_(file), weights_(weights) {}

Recipe::Value Recipe::parameter(const Json& described) const {
  Array wanted = read_array(described, "tensor");
  if (!wanted.dtype->is_float) refuse("numbers of " + std::string(wanted.dtype->name));
  const std::string rows = read_rows(wanted, file_, weights_);
  const size_t count = rows.size() / wanted.dtype->size;
  std::vector<float> numbers(count);
  convert(rows.data(), *wanted.dtype, numbers.data(), *dtype_named("float32"), count);
  return {wanted.dtype->name, wanted.sizes, {numbers.begin(), numbers.end()}};
}

Recipe::Made Recipe::make(const std::string& constant) const {
  const std::string* result = nullptr;
  for (const Json& pair : described_.at("constants").array())
    if (pair.array().size() == 2 && pair.items[0].string() == constant) result = value_name(pair.items[1]);
  if (!result) refuse("it does not make '" + constant.substr(0, 80) + "'");
  const std::vector<Json>&parameters = described_.at("parameters").array(),
        &operations = described_.at("operations").array();
  std::set<std::string, std::less<>> needed = {*result};
  for (size_t i = operations.size(); i-- > 0;) {
    if (!needed.count(operations[i].at("name").string())) continue;
    for (const Json& argument : operations[i].at("arguments").array())
      if (const std::string* name = value_name(argument)) needed.insert(*name);
  }
  Values values;
  for (const Json& one : parameters)
    if (needed.count(one.at("name").string())) values.emplace(one.at("name").string(), parameter(one));
  for (const Json& one : operations)
    if (needed.count(one.at("name").string())) values.emplace(one.at("name").string(), Step{one, values}.run());
  const auto made = values.find(*result);
  if (made == values.end()) refuse("a value that is never made");
  return {made->second.sizes, std::move(made->second.numbers)};
}

}  // namespace metalcore::c_api
