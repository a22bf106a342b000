// The left operand of a convolution as a product of matrices: a row for each pixel of the result, with a term for each
// element of x that the kernel meets there. It never stands in memory: threads gather its tiles.
#pragma once

#include "conv/places.h"
#include "gemm/tile.h"

// The place in the kernel and the channel that a term is of.
struct Term {
  uint channel, y, x;
};
inline Term term_at(constant ConvParams& p, uint index) {
  if (p.channels_last) {
    const uint place = index / p.channels;
    return {index % p.channels, place / p.window.x, place % p.window.x};
  }
  const uint row = index / p.window.x;
  return {row / p.window.y, row % p.window.y, index % p.window.x};
}
inline void next_place(constant ConvParams& p, thread Term& term) {
  if (++term.x < p.window.x) return;
  term.x = 0;
  ++term.y;
}
inline void next_term(constant ConvParams& p, thread Term& term) {
  if (p.channels_last) {
    if (++term.channel < p.channels) return;
    term.channel = 0;
    next_place(p, term);
  } else {
    next_place(p, term);
    if (term.y < p.window.y) return;
    term.y = 0;
    ++term.channel;
  }
}

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
