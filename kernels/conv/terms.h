// The terms of a convolution as a product of matrices.
#pragma once

#include "conv/places.h"

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
