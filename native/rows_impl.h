// What happens to rows between the products: norms, activations, quantisation. Sums run in a fixed
// order: position i goes to lane i mod 16, lanes are added as a tree at the end.
#pragma once
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "vec.h"

namespace slip {
namespace SLIP_NAMESPACE {

constexpr size_t kLanes = 16;
// 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
constexpr float kMagic = 12582912.0f;

inline V get(const float* p) { return load(p); }
inline V get(const uint16_t* p) { return load_bf16(p); }
inline void prefetch(const void* p) { __builtin_prefetch(p); }

inline V load_some(const float* p, size_t n) {  // n < 16 values, then zeros
  float f[kLanes] = {};
  for (size_t i = 0; i < n; ++i) f[i] = p[i];
  return load(f);
}
inline void store_some(float* p, V a, size_t n) {
  float f[kLanes];
  store(f, a);
  for (size_t i = 0; i < n; ++i) p[i] = f[i];
}
inline V load_up_to(const float* p, size_t n) { return n >= kLanes ? load(p) : load_some(p, n); }
inline void store_up_to(float* p, V a, size_t n) {
  if (n >= kLanes)
    store(p, a);
  else
    store_some(p, a, n);
}

// e^x within 2 units in the last place; x below -87 gives what -87 gives.
inline V exp(V x) {
  x = max(min(x, set1(88.0f)), set1(-87.0f));
  V shifted = fma(x, set1(1.44269504f), set1(kMagic));
  V n = sub(shifted, set1(kMagic));
  V r = fma(n, set1(-0.693359375f), x);  // ln 2 in two parts
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                  5.0000001201e-1f})
    p = fma(p, r, set1(c));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  return mul(p, shift_to_exponent(shifted));
}

inline void rms_norm(const float* x, const float* w, size_t n, float eps, float* y) {
  V squares = zero();
  for (size_t i = 0; i < n; i += kLanes) {
    V v = load_up_to(x + i, n - i);
    squares = fma(v, v, squares);
  }
  V scale = set1(1.0f / std::sqrt(sum_lanes(squares) / (float)n + eps));
  for (size_t i = 0; i < n; i += kLanes) {
    V v = mul(mul(load_up_to(x + i, n - i), scale), load_up_to(w + i, n - i));
    store_up_to(y + i, v, n - i);
  }
}

inline void layer_norm(const float* x, const float* w, const float* b, size_t n, float eps,
                       float* y) {
  V sum = zero();
  for (size_t i = 0; i < n; i += kLanes) sum = add(sum, load_up_to(x + i, n - i));
  float mean = sum_lanes(sum) / (float)n;
  V squares = zero();
  for (size_t i = 0; i < n; i += kLanes) {
    float d[kLanes] = {};
    for (size_t j = 0; j < kLanes && i + j < n; ++j) d[j] = x[i + j] - mean;
    V v = load(d);
    squares = fma(v, v, squares);
  }
  float scale = 1.0f / std::sqrt(sum_lanes(squares) / (float)n + eps);
  for (size_t i = 0; i < n; ++i) y[i] = std::fma((x[i] - mean) * scale, w[i], b ? b[i] : 0.0f);
}

inline V silu(V x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

inline V tanh(V x) {  // 1 - 2 / (e^2x + 1)
  return sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f))));
}

inline V gelu_tanh(V x) {
  V inner = mul(fma(mul(mul(x, x), x), set1(0.044715f), x), set1(0.7978845608f));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

inline V gelu(V x) {
  float f[kLanes];
  store(f, x);
  for (auto& v : f) v = 0.5f * v * (1.0f + std::erf(v * 0.70710678f));
  return load(f);
}

inline void activate(Activation kind, const float* gate, const float* up, size_t n, float* y) {
  for (size_t i = 0; i < n; i += kLanes) {
    V g = load_up_to(gate + i, n - i);
    g = kind == Activation::silu ? silu(g) : kind == Activation::gelu ? gelu(g) : gelu_tanh(g);
    if (up) g = mul(g, load_up_to(up + i, n - i));
    store_up_to(y + i, g, n - i);
  }
}

// The scale of a group of 32: its greatest size becomes 127.
inline float scale_of(V a, V b) {
  return std::max(0.0f, max_lanes(max(max(a, sub(zero(), a)), max(b, sub(zero(), b))))) / 127;
}

inline void quantise(const float* x, size_t K, size_t M, int8_t* q8, float* scale, int32_t* start,
                     float* total) {
  for (size_t g = 0; g < K / kGroup; ++g) {
    V a = load(x + g * kGroup), b = load(x + g * kGroup + kLanes);
    float s = scale_of(a, b);
    V inverse = set1(s > 0 ? 1 / s : 0), magic = set1(kMagic);
    a = add(mul(a, inverse), magic);
    b = add(mul(b, inverse), magic);
    int8_t q[kGroup];
    store_low_bytes(q, a);
    store_low_bytes(q + kLanes, b);
    int32_t sum = (int32_t)sum_lanes(add(sub(a, magic), sub(b, magic)));
    for (int j = 0; j < kGroup; j += 4) std::memcpy(q8 + (g * kGroup + j) * M, q + j, 4);
    scale[g * M] = s;
    start[g * M] = -128 * sum;
    total[g * M] = s * (float)sum;
  }
}

inline void split(const float* x, float* coarse, float* rest) {
  V a = load(x), b = load(x + kLanes);
  float s = scale_of(a, b);
  V inverse = set1(s > 0 ? 1 / s : 0), magic = set1(kMagic), scale = set1(s);
  a = mul(sub(add(mul(a, inverse), magic), magic), scale);
  b = mul(sub(add(mul(b, inverse), magic), magic), scale);
  store(coarse, a);
  store(coarse + kLanes, b);
  store(rest, sub(load(x), a));
  store(rest + kLanes, sub(load(x + kLanes), b));
}

inline float greatest(const float* x, size_t n) {
  V top = set1(-INFINITY);
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) top = max(top, load(x + i));
  float most = max_lanes(top);
  for (; i < n; ++i) most = std::max(most, x[i]);
  return most;
}

inline float exponentials(const float* x, size_t n, float top, float scale, float bound, float* y) {
  V sums = zero();
  for (size_t i = 0; i < n; i += kLanes) {
    size_t count = std::min(kLanes, n - i);
    float exponent[kLanes], power[kLanes];
    store(exponent, mul(sub(load_up_to(x + i, n - i), set1(top)), set1(scale)));
    store(power, exp(load(exponent)));
    for (size_t j = 0; j < kLanes; ++j)
      power[j] = j < count && exponent[j] >= bound ? power[j] : 0.0f;
    store_up_to(y + i, load(power), n - i);
    sums = add(sums, load(power));
  }
  return sum_lanes(sums);
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
