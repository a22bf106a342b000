// How an op would run, for people: metalcore.explain(op, …). Each family has a pure plan_*() that the op itself uses,
// and registers here a function that turns its plan into an Explanation.
#pragma once

#include "../gpu/encoder.h"

#include <torch/headeronly/core/ScalarType.h>

#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace metalcore {

using torch::headeronly::ScalarType;

struct Request {
  std::vector<std::vector<int64_t>> shapes;  // one per tensor argument
  ScalarType dtype;
  std::string device_type;                     // "mps", "cuda": whose kernels are asked about
  std::map<std::string, std::string> options;  // the op's other arguments, as Python's str() shows them

  std::string option(const std::string& name, const std::string& otherwise) const {
    auto found = options.find(name);
    return found == options.end() ? otherwise : found->second;
  }
  int64_t integer(const std::string& name, int64_t otherwise) const {
    const std::string text = option(name, std::to_string(otherwise));
    char* end = nullptr;
    const int64_t value = std::strtoll(text.c_str(), &end, 10);
    if (text.empty() || *end) throw std::invalid_argument("explain: " + name + " must be an integer, not " + text);
    return value;
  }
};

struct Step {
  std::string kernel;
  gpu::Size grid;         // in threadgroups, unless threads is set
  gpu::Size threadgroup;  // in threads
  bool threads = false;
};

struct Explanation {
  std::string variant;
  std::string why;
  std::vector<Step> steps;
};

using Explain = Explanation (*)(const Request&);

std::map<std::string_view, Explain>& explanations();

// At namespace scope: `static const ExplainOp explain_softmax_op("softmax", explain_softmax);`
struct ExplainOp {
  ExplainOp(const char* op, Explain explain) { explanations().emplace(op, explain); }
};

}  // namespace metalcore
