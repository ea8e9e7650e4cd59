#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace slip {
namespace {

constexpr size_t kLine = 64;  // bytes of a cache line

size_t bits(Format f) {
  switch (f) {
    case Format::f32:
      return 32;
    case Format::bf16:
      return 16;
    case Format::int8:
      return 8;
    default:
      return 4;
  }
}

uint16_t to_bf16(float x) {  // round to nearest even; a bf16 checkpoint comes through exactly
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if (std::isnan(x)) return (uint16_t)(u >> 16 | 64);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

}  // namespace

Matrix::Matrix(const float* w, size_t N, size_t K, Format format)
    : N_(N), K_(K), format_(format) {
  if (!N || !K) throw std::invalid_argument("a matrix needs at least one row and one column");
  bool grouped = format == Format::int8 || format == Format::int4;
  if (grouped && K % kGroup)
    throw std::invalid_argument("quantised weights need a multiple of 32 columns, got " +
                                std::to_string(K));
  weights_.assign(panels() * kPanel * K * bits(format) / 8 + kLine, 0);
  if (grouped) scale_.assign(panels() * kPanel * (K / kGroup), 0);
  if (format == Format::int4) shift_.assign(scale_.size(), 0);
  if (format == Format::int8)
    pack_int8(w);
  else if (format == Format::int4)
    pack_int4(w);
  else
    pack_float(w);
}

Columns Matrix::view() const {
  size_t misfit = (size_t)weights_.data() % kLine;
  const uint8_t* aligned = weights_.data() + (misfit ? kLine - misfit : 0);
  return {aligned, scale_.data(), shift_.data()};
}

size_t Matrix::bytes() const {
  return weights_.size() + (scale_.size() + shift_.size()) * sizeof(float);
}

void Matrix::pack_float(const float* w) {
  auto* wide = (float*)view().w;
  auto* narrow = (uint16_t*)view().w;
  for (size_t n = 0; n < N_; ++n)
    for (size_t k = 0; k < K_; ++k) {
      size_t at = (n / kPanel * K_ + k) * kPanel + n % kPanel;
      if (format_ == Format::f32)
        wide[at] = w[n * K_ + k];
      else
        narrow[at] = to_bf16(w[n * K_ + k]);
    }
}

void Matrix::pack_int8(const float* w) {
  auto* q = (int8_t*)view().w;
  for (size_t n = 0; n < N_; ++n)
    for (size_t g = 0; g < K_ / kGroup; ++g) {
      const float* from = w + n * K_ + g * kGroup;
      float most = 0;
      for (int j = 0; j < kGroup; ++j) most = std::max(most, std::fabs(from[j]));
      float scale = most / 127, inverse = scale > 0 ? 1 / scale : 0;
      size_t panel = n / kPanel, column = n % kPanel;
      scale_[(panel * (K_ / kGroup) + g) * kPanel + column] = scale;
      for (int j = 0; j < kGroup; ++j) {
        size_t k = g * kGroup + j;
        q[(panel * (K_ / 4) + k / 4) * 64 + column * 4 + k % 4] =
            (int8_t)std::clamp<long>(std::lrintf(from[j] * inverse), -127, 127);
      }
    }
}

void Matrix::pack_int4(const float* w) {
  auto* q = (uint8_t*)view().w;
  for (size_t n = 0; n < N_; ++n)
    for (size_t g = 0; g < K_ / kGroup; ++g) {
      const float* from = w + n * K_ + g * kGroup;
      auto [low, high] = std::minmax_element(from, from + kGroup);
      float d = (*high - *low) / 15, m = *low, inverse = d > 0 ? 1 / d : 0;
      size_t panel = n / kPanel, column = n % kPanel;
      size_t at = (panel * (K_ / kGroup) + g) * kPanel + column;
      scale_[at] = d;
      shift_[at] = m;
      for (int j = 0; j < kGroup; ++j) {
        size_t k = g * kGroup + j;
        long v = std::clamp<long>(std::lrintf((from[j] - m) * inverse), 0, 15);
        q[(panel * (K_ / 8) + k / 8) * 64 + column * 4 + k % 4] |= v << (k % 8 < 4 ? 0 : 4);
      }
    }
}

Rows Activations::arrange(const float* x, int count, size_t K, Format format) {
  size_t M = count;
  if (format == Format::f32 || format == Format::bf16) {
    f32.resize(K * M);
    for (size_t m = 0; m < M; ++m)
      for (size_t k = 0; k < K; ++k) f32[k * M + m] = x[m * K + k];
    return {count, f32.data(), nullptr, nullptr, nullptr};
  }
  q8.resize(K * M);
  scale.resize(K / kGroup * M);
  sum.resize(K / kGroup * M);
  for (size_t m = 0; m < M; ++m)
    for (size_t g = 0; g < K / kGroup; ++g) {
      const float* from = x + m * K + g * kGroup;
      float most = 0;
      for (int j = 0; j < kGroup; ++j) most = std::max(most, std::fabs(from[j]));
      float s = most / 127, inverse = s > 0 ? 1 / s : 0;
      int32_t total = 0;
      for (int j = 0; j < kGroup; ++j) {
        size_t k = g * kGroup + j;
        auto q = (int8_t)std::clamp<long>(std::lrintf(from[j] * inverse), -127, 127);
        q8[(k / 4 * M + m) * 4 + k % 4] = q;
        total += q;
      }
      scale[g * M + m] = s;
      sum[g * M + m] = total;
    }
  return {count, nullptr, q8.data(), scale.data(), sum.data()};
}

}  // namespace slip
