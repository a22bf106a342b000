// Convolutions of images as products of matrices, in tiles of pixels by channels of one group. It runs as gemm does: a
// threadgroup loads the next step's tiles into registers while it multiplies those in threadgroup memory.
//
//   packs     channels lie next to each other in x, and a group has packs of them
//   elements  all else
#include "conv/terms.h"
#include "gemm/tile.h"

// The left operand of a convolution as a product of matrices: a row for each pixel of the result, with a term for each
// element of x that the kernel meets there. It never stands in memory: threads gather its tiles.

// Tiles of GEMM_ROWS pixels. A thread has two packs of one pixel's terms. With kPacks, channels lie next to each other
// in x and are read as packs; the terms' order is channels_last then. Otherwise they are read one by one, by threads
// that have neighbouring pixels.
template <typename T, bool kPacks>
struct Patches {
  using Tile = Tiles<T, GEMM_ROWS, GEMM_STEP_BYTES / sizeof(T), true>;
  static constexpr constant uint kPack = kPackElements<T>, kStep = Tile::kStep;

  device const T* image;  // the group's first channel
  int2 corner;
  uint row, part;
  Term terms[2];  // of the packs

  Patches(constant ConvParams& p, device const T* x, uint group, uint first_pixel, uint thread_index)
      : row(kPacks ? thread_index / 2 : thread_index % GEMM_ROWS),
        part(kPacks ? thread_index % 2 : thread_index / GEMM_ROWS) {
    const Pixel pixel = pixel_at(p, metal::min(first_pixel + row, p.pixels - 1));
    image = x + int64_t(pixel.image) * p.x.image + int64_t(group * p.channels) * p.x.channel;
    corner = corner_of(p, pixel);
    if (kPacks) {
#pragma unroll
      for (uint i = 0; i < 2; ++i) terms[i] = term_at(p, column_of(part, i));
    }
  }

  // Where a pack's first term lies in a tile.
  static uint column_of(uint part, uint i) { return (kPacks ? 2 * i + part : 2 * part + i) * kPack; }

  // Where a term's element lies in the image, or -1 if it is padding or no term.
  int offset_of_term(constant ConvParams& p, Term term) const thread {
    const uint y = uint(corner.y) + term.y * p.dilation.y, x = uint(corner.x) + term.x * p.dilation.x;
    const bool exists = y < p.size.y && x < p.size.x && term.channel < p.channels && term.y < p.window.y;
    return exists ? int(term.channel) * p.x.channel + int(y) * p.x.y + int(x) * p.x.x : -1;
  }

  // Loads what the thread has of a tile. Each call is for the tile after the last one's.
  Held<T> load(constant ConvParams& p, uint step) thread {
    Held<T> held;
    if (kPacks) {
#pragma unroll
      for (uint i = 0; i < 2; ++i) {
        const int offset = offset_of_term(p, terms[i]);
        // A choice behind the load would wait for it.
        held.packs[i] = Pack<T>();
        if (offset >= 0) held.packs[i] = *reinterpret_cast<device const Pack<T>*>(image + offset);
        terms[i].channel += kStep;
        while (terms[i].channel >= p.channels && terms[i].y < p.window.y) {
          terms[i].channel -= p.channels;
          next_place(p, terms[i]);
        }
      }
    } else {
      Term term = term_at(p, step * kStep + column_of(part, 0));
#pragma unroll
      for (uint i = 0; i < 2 * kPack; ++i) {
        const int offset = offset_of_term(p, term);
        const T element = image[metal::max(offset, 0)];
        held.set(i / kPack, i % kPack, offset < 0 ? T(0.0f) : element);
        next_term(p, term);
      }
    }
    return held;
  }

  void store(threadgroup T* tile, thread const Held<T>& held) const thread {
#pragma unroll
    for (uint i = 0; i < 2; ++i)
      *reinterpret_cast<threadgroup Pack<T>*>(tile + row * Tile::kPitch + column_of(part, i)) = held.packs[i];
  }
};

template <typename T, bool kPacks>
[[kernel]] [[max_total_threads_per_threadgroup(GEMM_THREADS)]] void conv2d(
    device const T* x [[buffer(0)]], device const T* weight [[buffer(1)]], device const T* scale [[buffer(2)]],
    device const T* bias [[buffer(3)]], device const T* residual [[buffer(4)]], device T* result [[buffer(5)]],
    constant ConvParams& p [[buffer(6)]], uint2 threadgroup_place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint kStep = GEMM_STEP_BYTES / sizeof(T);
  // No simdgroup has two lanes' sums of a column in one bank.
  constexpr uint kPitch = GEMM_COLUMNS + 1;
  using Left = typename Patches<T, kPacks>::Tile;
  using Right = Tiles<T, kStep, GEMM_COLUMNS, false>;
  constexpr uint kTiles = 2 * (Left::kSize + Right::kSize);
  alignas(16) threadgroup float all_sums[kTiles * sizeof(T) / sizeof(float)];  // once tiles are not needed
  threadgroup T* const left_tiles = reinterpret_cast<threadgroup T*>(all_sums);
  threadgroup T* const right_tiles = left_tiles + 2 * Left::kSize;
  static_assert(GEMM_ROWS * kPitch * sizeof(float) <= kTiles * sizeof(T), "the sums fit");

  const uint column_tiles = (p.outputs + GEMM_COLUMNS - 1) / GEMM_COLUMNS;
  const uint group = threadgroup_place.x / column_tiles, column = threadgroup_place.x % column_tiles * GEMM_COLUMNS;
  const uint first_pixel = (p.first + threadgroup_place.y) * GEMM_ROWS, first_channel = group * p.outputs;
  Patches<T, kPacks> left(p, x, group, first_pixel, thread_index);
  Right right({weight + int64_t(first_channel) * p.weight.image, p.weight_term, p.weight.image, p.weight_packs != 0},
              {0, column, p.terms, p.outputs}, thread_index);
  Sums<4, 4, 2> sums(simdgroup);

  const uint steps = (p.terms + kStep - 1) / kStep;
  Held<T> next_left, next_right;
  for (uint step = 0; step <= steps; ++step) {
    // Step 0 loads tiles only, and the last one multiplies only.
    if (step < steps) {
      next_left = left.load(p, step);
      next_right = right.load();
    }
    if (step > 0)
      sums.add<Left, Right>(left_tiles + (step - 1) % 2 * Left::kSize, right_tiles + (step - 1) % 2 * Right::kSize);
    if (step < steps) {
      left.store(left_tiles + step % 2 * Left::kSize, next_left);
      right.store(right_tiles + step % 2 * Right::kSize, next_right, step, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  sums.store<4>(all_sums, kPitch, 0);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // Threads next to each other write what lies next to each other.
  const ConvEpilogue<T> epilogue = {scale, bias, residual, result};
  const bool by_channels = p.result.channel == 1;
  const uint share = thread_index % 64, other = thread_index / 64;
  uint in_row = by_channels ? other : share, in_column = by_channels ? share : other;
  Pixel pixel = pixel_at(p, first_pixel + in_row);
  for (uint i = 0; i < 64 / (GEMM_THREADS / 64); ++i) {
    if (first_pixel + in_row < p.pixels && column + in_column < p.outputs)
      epilogue.store(p, pixel, first_channel + column + in_column, all_sums[in_row * kPitch + in_column]);
    if (by_channels) {
      in_row += GEMM_THREADS / 64;
      pixel = later(p, pixel, GEMM_THREADS / 64);
    } else {
      in_column += GEMM_THREADS / 64;
    }
  }
}

#define INSTANTIATE(T)                                                                             \
  template [[host_name("conv2d_packs_" #T)]] [[kernel]] decltype(conv2d<T, true>) conv2d<T, true>; \
  template [[host_name("conv2d_elements_" #T)]] [[kernel]] decltype(conv2d<T, false>) conv2d<T, false>;
INSTANTIATE(float)
INSTANTIATE(half)
INSTANTIATE(bfloat)
