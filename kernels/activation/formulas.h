// Activations of one element, and their derivatives: Op::forward(x), and OpGradient::forward(x, gradient of the
// result). T is the type of the results in memory. The arithmetic is float32.
#pragma once

#include <metal_stdlib>

using namespace metal;

constexpr constant float kInvSqrt2Pi = 0.3989422804f;  // 1 / sqrt(2 pi)
constexpr constant float kTanhScale = 0.7978845608f;   // sqrt(2 / pi)
constexpr constant float kTanhCubic = 0.044715f;

// The math functions for results of type T: a GPU's fast ones are accurate enough for 16 bits.
template <typename T>
struct Math {
  static float exp(float x) { return fast::exp(x); }
  static float divide(float x, float y) { return fast::divide(x, y); }
};
template <>
struct Math<float> {
  static float exp(float x) { return precise::exp(x); }
  static float divide(float x, float y) { return x / y; }
};

template <typename T>
struct Silu {
  static float forward(float x) { return Math<T>::divide(x, 1.0f + Math<T>::exp(-x)); }
};

template <typename T>
struct SiluGradient {
  static float forward(float x, float grad) {
    const float s = Math<T>::divide(1.0f, 1.0f + Math<T>::exp(-x));
    return grad * (s * (1.0f + x * (1.0f - s)));
  }
};

// NaN, which is neither less nor greater, stays. The gradient is that of x as well as of relu(x).
template <typename T>
struct Relu {
  static float forward(float x) { return x < 0.0f ? 0.0f : x; }
};

template <typename T>
struct ReluGradient {
  static float forward(float x, float grad) { return x <= 0.0f ? 0.0f : grad; }
};

// exp(-x^2 / 2), and with it the normal distribution function Phi(x). With t = |x|, Phi(-t) exp(t^2 / 2) is smooth and
// decays slowly. It is computed as a polynomial in u = (t - 3) / (t + 3) that is fitted for least relative error
// (1e-8). Unlike (1 + erf(x / sqrt 2)) / 2 this keeps its relative accuracy where Phi is small.
template <typename T>
struct Normal {
  float density;
  float below;
  explicit Normal(float x) {
    const float t = min(fabs(x), 20.0f);
    const float u = Math<T>::divide(t - 3.0f, t + 3.0f);
    float p = 5.31617334e-05f;
    p = p * u + 1.15013776e-04f;
    p = p * u - 3.39012651e-04f;
    p = p * u - 9.83288395e-04f;
    p = p * u + 2.90438742e-03f;
    p = p * u + 6.13194238e-03f;
    p = p * u - 4.62132618e-02f;
    p = p * u + 1.23225041e-01f;
    p = p * u - 2.06402615e-01f;
    p = p * u + 1.21513948e-01f;
    density = Math<T>::exp(-0.5f * t * t);
    const float tail = p * density;
    below = x < 0.0f ? tail : 1.0f - tail;
  }
};

template <typename T>
struct Gelu {
  static float forward(float x) { return x * Normal<T>(x).below; }
};

template <typename T>
struct GeluGradient {
  static float forward(float x, float grad) {
    const Normal<T> normal(x);
    return grad * (normal.below + x * normal.density * kInvSqrt2Pi);
  }
};

// (1 + tanh(v)) / 2 is 1 / (1 + exp(-2 v)), which keeps its relative accuracy where it is small.
template <typename T>
struct GeluTanh {
  static float forward(float x) {
    const float inner = kTanhScale * (x + kTanhCubic * x * x * x);
    return Math<T>::divide(x, 1.0f + Math<T>::exp(-2.0f * inner));
  }
};

template <typename T>
struct GeluTanhGradient {
  static float forward(float given, float grad) {
    const float x = fabs(given) > 1e4f ? copysign(1e4f, given) : given;  // beyond it x^2 s (1 - s) would be inf times 0
    const float square = x * x;
    const float inner = kTanhScale * (x + kTanhCubic * x * square);
    const float s = Math<T>::divide(1.0f, 1.0f + Math<T>::exp(-2.0f * inner));
    const float slope = kTanhScale * (1.0f + 3.0f * kTanhCubic * square);
    return grad * (s + 2.0f * x * s * (1.0f - s) * slope);
  }
};

// The square of relu. NaN stays.
template <typename T>
struct Relu2 {
  static float forward(float x) { return x < 0.0f ? 0.0f : x * x; }
};

template <typename T>
struct Relu2Gradient {
  static float forward(float x, float grad) { return x <= 0.0f ? 0.0f : grad * (2.0f * x); }
};

constexpr constant float kQuickScale = 1.702f;

template <typename T>
struct QuickGelu {
  static float forward(float x) { return Math<T>::divide(x, 1.0f + Math<T>::exp(-kQuickScale * x)); }
};

template <typename T>
struct QuickGeluGradient {
  static float forward(float x, float grad) {
    const float s = Math<T>::divide(1.0f, 1.0f + Math<T>::exp(-kQuickScale * x));
    return grad * (s + kQuickScale * (x * (s * (1.0f - s))));  // where kQuickScale x overflows, s (1 - s) is 0
  }
};
