// What the kernels of a merge hand on.
#pragma once

#include <metal_stdlib>

#include "tridiagonal.h"

#define TRIDIAGONAL_NONE 0xffffffffu  // no chain
#define TRIDIAGONAL_ROOT 0xfffffffeu  // no deflated entry, and so no chain either

// The first `roots` entries have a pole of the secular equation each, and those behind them are deflated.
struct TridiagonalMerge {
  float rho;
  uint roots;
};

// Rows (of the parts' eigenvectors): the bits of z, the entry's place in the order of chains, and its chain's root or
// TRIDIAGONAL_NONE.
//
// Deflated entries: an eigenvector is a z_r in the rows r of the chain `root` before `place`, and b in the row at
// `place`: the bits of a, those of b, place, root.
