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
  const size_t each[] = {32, 16, 8, 4};
  return each[(int)f];
}

bool grouped(Format f) { return f == Format::int8 || f == Format::int4; }

size_t block_bytes(Stored stored) {
  return stored == Stored::q4_0 ? 18 : stored == Stored::q4_1 ? 20 : 34;
}

template <class T>
T read(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

float bf16_to_float(uint16_t x) {
  uint32_t u = (uint32_t)x << 16;
  return read<float>(&u);
}

}  // namespace

float half_to_float(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
  uint32_t u = sign | ((rest << 13) + (112u << 23));  // normal numbers: another exponent
  if (rest >= 0x7c00) u = sign | 0x7f800000 | (rest & 0x3ff) << 13;
  if (rest < 0x400) {  // subnormal: a multiple of 2^-24
    float f = (float)rest * 5.9604644775390625e-8f;
    u = sign | read<uint32_t>(&f);
  }
  return read<float>(&u);
}

uint16_t float_to_half(float x) {
  uint32_t u = read<uint32_t>(&x), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
  if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds to 65536 or more
  if (rest < 0x38800000) {                                   // below 2^-14: subnormal
    float f = read<float>(&rest);
    return (uint16_t)(sign | (uint32_t)std::lrintf(f * 16777216.0f));
  }
  rest += 0xfff + (rest >> 13 & 1);  // to the nearest, ties to even
  return (uint16_t)(sign | ((rest - (112u << 23)) >> 13));
}

uint16_t float_to_bf16(float x) {
  uint32_t u = read<uint32_t>(&x);
  if (std::isnan(x)) return (uint16_t)(u >> 16 | 64);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

size_t row_bytes(Stored stored, size_t K) {
  if (stored == Stored::f32) return K * 4;
  if (stored == Stored::bf16) return K * 2;
  return K / kGroup * block_bytes(stored);
}

Matrix::Matrix(size_t N, size_t K, Format format) : N_(N), K_(K), format_(format) {
  if (!N || !K) throw std::invalid_argument("a matrix needs at least one row and one column");
  if (grouped(format) && K % kGroup)
    throw std::invalid_argument("quantised weights need a multiple of 32 columns, got " +
                                std::to_string(K));
  weights_.assign(panels() * kPanel * K * bits(format) / 8 + kLine, 0);
  if (grouped(format)) scale_.assign(panels() * kPanel * (K / kGroup), 0);
  if (format == Format::int4) shift_.assign(scale_.size(), 0);
}

Columns Matrix::view() const {
  size_t misfit = (size_t)weights_.data() % kLine;
  const uint8_t* aligned = weights_.data() + (misfit ? kLine - misfit : 0);
  return {aligned, scale_.data(), shift_.data()};
}

size_t Matrix::bytes() const { return weights_.size() + (scale_.size() + shift_.size()) * 2; }

void Matrix::set(size_t first, size_t count, const void* rows, Stored stored) {
  if (first + count > N_) throw std::invalid_argument("more rows than the matrix has");
  bool floats = stored == Stored::f32 || stored == Stored::bf16;
  if (!floats && format_ != (stored == Stored::q8_0 ? Format::int8 : Format::int4))
    throw std::invalid_argument("these blocks don't go into a matrix of this format");
  std::vector<float> wide(K_);
  for (size_t n = first; n < first + count; ++n) {
    auto* from = (const uint8_t*)rows + (n - first) * row_bytes(stored, K_);
    if (!floats) {
      for (size_t g = 0; g < K_ / kGroup; ++g)
        set_block(n, g, from + g * block_bytes(stored), stored);
      continue;
    }
    if (stored == Stored::f32)
      std::memcpy(wide.data(), from, K_ * 4);
    else
      for (size_t k = 0; k < K_; ++k) wide[k] = bf16_to_float(read<uint16_t>(from + 2 * k));
    size_t at = n / kPanel * K_ * kPanel + n % kPanel;
    if (format_ == Format::f32) {
      auto* w = (float*)view().w + at;
      for (size_t k = 0; k < K_; ++k) w[k * kPanel] = wide[k];
    } else if (format_ == Format::bf16) {
      auto* w = (uint16_t*)view().w + at;
      for (size_t k = 0; k < K_; ++k) w[k * kPanel] = float_to_bf16(wide[k]);
    } else {
      for (size_t g = 0; g < K_ / kGroup; ++g) set_group(n, g, wide.data() + g * kGroup);
    }
  }
}

void Matrix::put(size_t n, size_t k, int q) {
  auto* w = (uint8_t*)view().w;
  size_t panel = n / kPanel, column = n % kPanel;
  if (format_ == Format::int8) {
    w[(panel * (K_ / 4) + k / 4) * 64 + column * 4 + k % 4] = (uint8_t)q;
    return;
  }
  uint8_t& both = w[(panel * (K_ / 8) + k / 8) * 64 + column * 4 + k % 4];
  both = k % 8 < 4 ? (uint8_t)((both & 0xf0) | q) : (uint8_t)((both & 0x0f) | q << 4);
}

void Matrix::set_group(size_t n, size_t g, const float* w) {
  size_t at = (n / kPanel * (K_ / kGroup) + g) * kPanel + n % kPanel;
  auto [low, high] = std::minmax_element(w, w + kGroup);
  bool four = format_ == Format::int4;
  int most = four ? 15 : 127;
  float range = four ? *high - *low : std::max(*high, -*low);
  uint16_t m = four ? float_to_half(*low) : 0, d = float_to_half(range / (float)most);
  scale_[at] = d;
  if (four) shift_[at] = m;
  float shift = half_to_float(m), scale = half_to_float(d), inverse = scale > 0 ? 1 / scale : 0;
  for (int j = 0; j < kGroup; ++j) {
    long q = std::lrintf((w[j] - shift) * inverse);
    put(n, g * kGroup + j, (int)std::clamp<long>(q, four ? 0 : -127, most));
  }
}

void Matrix::set_block(size_t n, size_t g, const uint8_t* block, Stored stored) {
  size_t at = (n / kPanel * (K_ / kGroup) + g) * kPanel + n % kPanel;
  scale_[at] = read<uint16_t>(block);
  if (stored == Stored::q8_0) {
    for (int j = 0; j < kGroup; ++j) put(n, g * kGroup + j, (int8_t)block[2 + j]);
    return;
  }
  bool shifted = stored == Stored::q4_1;  // the other is d*(q - 8)
  shift_[at] = shifted ? read<uint16_t>(block + 2)
                       : float_to_half(-8 * half_to_float(scale_[at]));
  const uint8_t* q = block + (shifted ? 4 : 2);
  for (int j = 0; j < kGroup / 2; ++j) {
    put(n, g * kGroup + j, q[j] & 15);
    put(n, g * kGroup + kGroup / 2 + j, q[j] >> 4);
  }
}

void Matrix::row(size_t n, float* out) const {
  Columns c = view();
  size_t panel = n / kPanel, column = n % kPanel;
  for (size_t k = 0; k < K_; ++k) {
    size_t at = (panel * K_ + k) * kPanel + column;
    if (format_ == Format::f32) {
      out[k] = ((const float*)c.w)[at];
    } else if (format_ == Format::bf16) {
      out[k] = bf16_to_float(((const uint16_t*)c.w)[at]);
    } else {
      size_t group = (panel * (K_ / kGroup) + k / kGroup) * kPanel + column;
      float scale = half_to_float(scale_[group]);
      if (format_ == Format::int8) {
        int8_t q = ((const int8_t*)c.w)[(panel * (K_ / 4) + k / 4) * 64 + column * 4 + k % 4];
        out[k] = scale * q;
      } else {
        uint8_t both = ((const uint8_t*)c.w)[(panel * (K_ / 8) + k / 8) * 64 + column * 4 + k % 4];
        out[k] = std::fma(scale, k % 8 < 4 ? both & 15 : both >> 4, half_to_float(shift_[group]));
      }
    }
  }
}

Rows Activations::arrange(const Kernels& kernels, const float* x, int count, size_t K,
                          Format format) {
  size_t M = count;
  if (!grouped(format)) {
    f32.resize(K * M);
    for (size_t k = 0; k < K; ++k)
      for (size_t m = 0; m < M; ++m) f32[k * M + m] = x[m * K + k];
    return {count, f32.data()};
  }
  q8.resize(K * M);
  scale.resize(K / kGroup * M);
  start.resize(K / kGroup * M);
  total.resize(K / kGroup * M);
  for (size_t m = 0; m < M; ++m)
    kernels.quantise(x + m * K, K, M, q8.data() + m * 4, scale.data() + m, start.data() + m,
                     total.data() + m);
  return {count, nullptr, q8.data(), scale.data(), start.data(), total.data()};
}

}  // namespace slip
