// Weights into panels, activations into the kernels' layout. All pure functions on arrays.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace slip {

// What rows of weights may be given as. The last three: GGUF blocks of 32, carried over exactly.
enum class Stored { f32, bf16, q4_0, q4_1, q8_0 };

// Bytes of a row of K weights.
size_t row_bytes(Stored stored, size_t K);

// A packed matrix W[N][K], N padded with zero columns to whole panels.
class Matrix {
 public:
  // Quantised formats need K to be a multiple of 32; throws std::invalid_argument otherwise.
  Matrix(size_t N, size_t K, Format format);

  // Rows first ... first + count - 1 from row-major memory. Floating-point rows go into any format
  // (int8: symmetric; int4: w = d*q + m, d and m from the least and the greatest of the group);
  // q4_0 and q4_1 into int4 only, q8_0 into int8 only. Different rows may be set by different
  // threads if they lie in different panels.
  void set(size_t first, size_t count, const void* rows, Stored stored);

  // Row n as floats: what the packed weights stand for.
  void row(size_t n, float* out) const;

  size_t rows() const { return N_; }     // N: columns of the product
  size_t columns() const { return K_; }  // K
  size_t panels() const { return (N_ + kPanel - 1) / kPanel; }
  size_t bytes() const;
  Format format() const { return format_; }
  Columns view() const;

 private:
  void set_group(size_t n, size_t group, const float* w);
  void set_block(size_t n, size_t group, const uint8_t* block, Stored stored);
  void put(size_t n, size_t k, int q);

  size_t N_, K_;
  Format format_;
  std::vector<uint8_t> weights_;  // aligned by hand to a cache line
  std::vector<uint16_t> scale_, shift_;  // fp16, as in the blocks of GGUF
};

// Room for the activations of one product; reused from step to step.
struct Activations {
  std::vector<float> f32, scale, total;
  std::vector<int8_t> q8;
  std::vector<int32_t> start;

  // x: count rows [count][K], count <= kMaxRows. Quantised for the integer formats, each row and
  // group of 32 by itself: a row's values never depend on its neighbours.
  Rows arrange(const Kernels& kernels, const float* x, int count, size_t K, Format format);
};

float half_to_float(uint16_t half);
uint16_t float_to_half(float x);  // rounds to the nearest
uint16_t float_to_bf16(float x);  // rounds to the nearest; a bf16 checkpoint comes through exactly

}  // namespace slip
