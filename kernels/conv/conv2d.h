// Arguments of the kernels for convolutions of images, shared with the host.
#pragma once

#include "../gemm/gemm.h"

// Threads of the kernels without tiles make so many results next to each other in a row: of a channel, or of a pack of
// channels.
#define CONV_RUN 4
#define CONV_PIXELS 2
#define CONV_THREADS 128
// The pixels of a tile, and its threads, on GPUs whose units multiply tensors: where a core has several threadgroups,
// or else one.
#define CONV_UNIT_PIXELS 128
#define CONV_UNIT_THREADS 128
#define CONV_UNIT_DEEP_THREADS 256
#define CONV_UNIT_STEP 64
// A threadgroup of the kernel for another order has so many elements in each direction.
#define CONV_ORDER_SIDE 64
#define CONV_ORDER_THREADS 256

// Distances in elements. All of one image lies within 2^31 of them.
struct ConvImages {
  int64_t image;
  int32_t channel, y, x;
};

// Sizes, steps or places.
struct ConvPair {
  uint32_t y, x;
};

// result = activation(scale * (x convolved with weight) + bias + residual), for the images of a batch. Channels belong
// to groups, each with `channels` of x's and `outputs` of the result's.
struct ConvParams {
  ConvImages x, residual, result;
  ConvImages weight;                           // an image is what makes one channel of the result
  int64_t weight_term;                         // the distance of terms in the order that they have
  ConvPair size, out;                          // of images
  ConvPair window, stride, dilation, padding;  // the window is what a kernel covers
  uint32_t groups, channels, outputs;
  uint32_t terms;          // channels, times the kernel's size
  uint32_t pixels;         // of all images of the result
  uint32_t first;          // the dispatch's first tile of pixels, or its first thread
  uint32_t runs;           // of CONV_RUN or CONV_PIXELS results, in a row of pixels
  uint32_t channels_last;  // whether a place's channels are terms behind one another, and not a channel's places
  uint32_t weight_packs;   // whether 16 bytes of it can be read at a time
  uint32_t activation;     // GEMM_RELU …
  uint32_t has_scale, has_bias, has_residual;
  int32_t scale_step, bias_step;
  uint32_t split_terms;  // where units multiply tensors: a threadgroup's terms, or more
  uint32_t together;     // threadgroups that share a tile and run together, or 1
};

// An image is a matrix of `rows` by `columns` before, and its transposed one after.
struct ConvOrderParams {
  uint32_t rows, columns;
  uint32_t first;  // the dispatch's first image
};

// Images with a pixel's channels as neighbours, in packs of 8 with zeros where there are no channels. Where groups are
// joined, an image makes one channel of the result, and its channels lie where its group's are in those of all of them.
struct ConvOrderPacksParams {
  ConvImages from;
  ConvPair size;
  uint32_t channels;
  uint32_t outputs;  // of a group
  uint32_t joined;   // groups
  uint32_t packs;    // of a pixel
  uint32_t first;    // the dispatch's first pack
};
