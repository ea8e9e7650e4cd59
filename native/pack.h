// Weights into panels, activations into the kernels' layout. All pure functions on arrays.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace slip {

// A packed matrix W[N][K], N padded with zero columns to whole panels.
class Matrix {
 public:
  // w: [N][K] row-major fp32. int8: symmetric, a scale a column and group of 32. int4: w = d*q + m,
  // d and m from the least and the greatest weight of the group. K must be a multiple of 32 for
  // both; throws std::invalid_argument otherwise.
  Matrix(const float* w, size_t N, size_t K, Format format);

  size_t rows() const { return N_; }     // N: columns of the product
  size_t columns() const { return K_; }  // K
  size_t panels() const { return (N_ + kPanel - 1) / kPanel; }
  size_t bytes() const;
  Format format() const { return format_; }
  Columns view() const;

 private:
  void pack_float(const float* w);
  void pack_int8(const float* w);
  void pack_int4(const float* w);

  size_t N_, K_;
  Format format_;
  std::vector<uint8_t> weights_;  // aligned by hand to a cache line
  std::vector<float> scale_, shift_;
};

// Room for the activations of one product; reused from step to step.
struct Activations {
  std::vector<float> f32, scale;
  std::vector<int8_t> q8;
  std::vector<int32_t> sum;

  // x: count rows [count][K], count <= kMaxRows. Quantised for the integer formats, each row and
  // group of 32 by itself: a row's values never depend on its neighbours.
  Rows arrange(const float* x, int count, size_t K, Format format);
};

}  // namespace slip
