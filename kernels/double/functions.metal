// Functions of one pair or of two, for each element of contiguous tensors.
#include "double/functions.h"

struct Add {
  static Pair of(Pair a, Pair b) { return add(a, b); }
};
struct Multiply {
  static Pair of(Pair a, Pair b) { return multiply(a, b); }
};
struct Divide {
  static Pair of(Pair a, Pair b) { return quotient(a, b); }
};
struct SquareRoot {
  static Pair of(Pair x) { return square_root(x); }
};
struct Exponential {
  static Pair of(Pair x) { return exponential(x); }
};
struct Logarithm {
  static Pair of(Pair x) { return logarithm(x); }
};
struct Sine {
  static Pair of(Pair x) { return sine(x, 0); }
};
struct Cosine {
  static Pair of(Pair x) { return sine(x, 1); }
};
struct HyperbolicTangent {
  static Pair of(Pair x) { return hyperbolic_tangent(x); }
};

template <typename Function>
kernel void double_of_one(device const Pair* x [[buffer(0)]], device Pair* result [[buffer(1)]],
                          uint i [[thread_position_in_grid]]) {
  result[i] = Function::of(x[i]);
}

template <typename Function>
kernel void double_of_two(device const Pair* x [[buffer(0)]], device const Pair* y [[buffer(1)]],
                          device Pair* result [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  result[i] = Function::of(x[i], y[i]);
}

#define OF_ONE(name, Function) \
  template [[host_name("double_" name)]] [[kernel]] decltype(double_of_one<Function>) double_of_one<Function>;
#define OF_TWO(name, Function) \
  template [[host_name("double_" name)]] [[kernel]] decltype(double_of_two<Function>) double_of_two<Function>;
OF_TWO("add", Add)
OF_TWO("mul", Multiply)
OF_TWO("div", Divide)
OF_ONE("sqrt", SquareRoot)
OF_ONE("exp", Exponential)
OF_ONE("log", Logarithm)
OF_ONE("sin", Sine)
OF_ONE("cos", Cosine)
OF_ONE("tanh", HyperbolicTangent)
