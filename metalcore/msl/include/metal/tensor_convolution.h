// mpp::tensor_ops::convolution2d: convolutions of images by the simdgroups of a threadgroup. Tensors have the channels
// first, then the width, the height and the images; a weight has the channels of the result, those of the images, and
// the window's width and height.
#pragma once

#include "metal/tensor_ops.h"

namespace mpp::tensor_ops {

enum class convolution2d_activation_layout { nhwc };
enum class convolution2d_weights_layout { hwio };

struct convolution2d_descriptor {
  enum class mode { multiply, multiply_accumulate };

  metal::int4 destination_dimensions, source_dimensions;
  metal::int2 kernel_dimensions;
  convolution2d_activation_layout activation_layout;
  convolution2d_weights_layout weights_layout;
  metal::int2 strides, dilations;
  int groups;
  bool relaxed_precision;
  mode conv2d_mode;

  METAL_FUNC constexpr convolution2d_descriptor(
      metal::int4 destination_dimensions, metal::int4 source_dimensions, metal::int2 kernel_dimensions,
      convolution2d_activation_layout activation_layout = convolution2d_activation_layout::nhwc,
      convolution2d_weights_layout weights_layout = convolution2d_weights_layout::hwio,
      metal::int2 strides = metal::int2(1, 1), metal::int2 dilations = metal::int2(1, 1), int groups = 1,
      bool relaxed_precision = false, mode convolution2d_mode = mode::multiply)
      : destination_dimensions(destination_dimensions),
        source_dimensions(source_dimensions),
        kernel_dimensions(kernel_dimensions),
        activation_layout(activation_layout),
        weights_layout(weights_layout),
        strides(strides),
        dilations(dilations),
        groups(groups),
        relaxed_precision(relaxed_precision),
        conv2d_mode(convolution2d_mode) {}
};

}  // namespace mpp::tensor_ops

namespace msl {

// Channels, width, height and images of a result. Its matrix has a row for each pixel, and a column for each channel.
template <int channels, int width, int height, int images, int simdgroups>
struct ImageLayout : MatrixLayout<width * height * images, channels, simdgroups, Operand::destination> {
  static constexpr int rank = 4;

  static METAL_FUNC metal::array<int, 4> index(ElementPlace place) {
    return {place.column, place.row % width, place.row / width % height, place.row / (width * height)};
  }
};

template <class L, class R, class D>
constexpr bool has_convolution() {
  using metal::bfloat, metal::half;
  if constexpr (!std::is_same_v<L, R>)
    return false;
  else if constexpr (is_among<L, char, int8_t>)
    return std::is_same_v<D, int32_t>;
  else
    return is_among<L, half, bfloat, float> && is_among<D, L, float>;
}

}  // namespace msl

namespace mpp::tensor_ops {

template <convolution2d_descriptor Descriptor, class Scope, class... Arguments>
class convolution2d {
  static constexpr int simdgroups = msl::simdgroups_of<Scope>;
  static constexpr int channels = Descriptor.destination_dimensions[0], width = Descriptor.destination_dimensions[1],
                       height = Descriptor.destination_dimensions[2], images = Descriptor.destination_dimensions[3],
                       window_x = Descriptor.kernel_dimensions[0], window_y = Descriptor.kernel_dimensions[1],
                       stride_x = Descriptor.strides[0], stride_y = Descriptor.strides[1],
                       dilation_x = Descriptor.dilations[0], dilation_y = Descriptor.dilations[1];
  static constexpr bool accumulates = Descriptor.conv2d_mode == convolution2d_descriptor::mode::multiply_accumulate;
  static_assert(Descriptor.groups == 1, "a convolution2d_descriptor has groups of 1");
  static_assert(channels > 0 && width > 0 && height > 0 && images > 0 && window_x > 0 && window_y > 0 &&
                    stride_x > 0 && stride_y > 0 && dilation_x > 0 && dilation_y > 0,
                "the lengths, strides and dilations of a convolution2d_descriptor are at least 1");
  static_assert(simdgroups > 0, "the scope of convolution2d is execution_simdgroups<N>, of a whole threadgroup");
  using Layout = msl::ImageLayout<channels, width, height, images, simdgroups>;

  metal::int2 offsets = metal::int2(0, 0);

 public:
  template <class Activation, class Weights, class T, class Coordinate = int, class... More>
  using cooperative_tensor_destination_t =
      metal::cooperative_tensor<T, metal::extents<Coordinate, size_t(channels), size_t(width), size_t(height), size_t(images)>,
                                Layout>;

  template <class Activation, class Weights, class T, class Coordinate = int, class... More>
  METAL_FUNC auto get_destination_cooperative_tensor() const {
    check_types<Activation, Weights, T>();
    return cooperative_tensor_destination_t<Activation, Weights, T, Coordinate>();
  }

  // Where the window of the first pixel has its middle.
  METAL_FUNC void set_offsets(metal::int2 given) { offsets = given; }

  // All threads of the threadgroup call it. Elements outside of the images are zero, and nothing is written outside.
  template <class Activation, class Weights, class Destination>
  METAL_FUNC void run(Activation& activation, Weights& weights, Destination& destination,
                      uint32_t line = __builtin_LINE()) const {
    using D = typename Destination::value_type;
    check_types<Activation, Weights, D>();
    if constexpr (msl::is_cooperative<Destination>)
      static_assert(std::is_same_v<typename Destination::layout, Layout>,
                    "the destination is a cooperative tensor of another operation");
    else
      static_assert(Destination::get_rank() == 4, "convolution2d takes tensors of four dimensions");
    msl::check_scope<simdgroups>(
        line, msl::mixed(accumulates, channels, width, height, images, window_x, window_y, stride_x, stride_y, dilation_x,
                         dilation_y, offsets[0], offsets[1], msl::digest_of(activation), msl::digest_of(weights),
                         msl::digest_of(destination)));
    using Sum = std::conditional_t<std::is_integral_v<D>, int32_t, float>;
    for (int i = 0; i < Layout::capacity; ++i) {
      const msl::ElementPlace place = Layout::place(i);
      if (!place.is_valid) continue;
      const auto at = Layout::index(place);
      Sum sum = 0;
      if constexpr (msl::is_cooperative<Destination>) {
        if (accumulates) sum = Sum(destination.value(i));
        destination.give(i, D(add(activation, weights, at, sum)));
      } else {
        if (!msl::has_pixel(destination, at)) continue;
        auto& element = msl::pixel_of(destination, at);
        if (accumulates) sum = Sum(element);
        element = D(add(activation, weights, at, sum));
      }
    }
  }

 private:
  template <class Activation, class Weights, class D>
  static METAL_FUNC constexpr void check_types() {
    static_assert(Activation::get_rank() == 4 && Weights::get_rank() == 4,
                  "convolution2d takes tensors of four dimensions");
    static_assert(msl::has_convolution<typename Activation::value_type, typename Weights::value_type, D>(),
                  "convolution2d does not multiply these types into that one");
  }

  template <class Activation, class Weights, class Sum>
  METAL_FUNC Sum add(const Activation& activation, const Weights& weights, const metal::array<int, 4>& at, Sum sum) const {
    const int left = at[1] * stride_x + offsets[0] - ((window_x - 1) * dilation_x + 1) / 2;
    const int top = at[2] * stride_y + offsets[1] - ((window_y - 1) * dilation_y + 1) / 2;
    const int inputs = metal::min(int(activation.get_extent(0)), int(weights.get_extent(1)));
    for (int y = 0; y < window_y; ++y)
      for (int x = 0; x < window_x; ++x)
        for (int c = 0; c < inputs; ++c) {
          const metal::array<int, 4> from = {c, left + x * dilation_x, top + y * dilation_y, at[3]};
          const metal::array<int, 4> by = {at[0], c, x, y};
          if (msl::has_pixel(activation, from) && msl::has_pixel(weights, by))
            sum = msl::add_product(Sum(msl::pixel_of(activation, from)), Sum(msl::pixel_of(weights, by)), sum);
        }
    return sum;
  }
};

}  // namespace mpp::tensor_ops
