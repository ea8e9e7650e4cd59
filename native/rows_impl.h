// What happens to rows between the products: norms, activations, attention. Sums run in a fixed
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

inline float sum_lanes(V a) {
  float f[kLanes];
  store(f, a);
  for (size_t half = kLanes / 2; half; half /= 2)
    for (size_t i = 0; i < half; ++i) f[i] += f[i + half];
  return f[0];
}

inline float max_lanes(V a) {
  float f[kLanes], most = -INFINITY;  // and not the first lane, which may be no number
  store(f, a);
  for (float v : f) most = std::max(most, v);
  return most;
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

inline void quantise(const float* x, size_t K, size_t M, int8_t* q8, float* scale, int32_t* sum) {
  for (size_t g = 0; g < K / kGroup; ++g) {
    V a = load(x + g * kGroup), b = load(x + g * kGroup + kLanes);
    float s = scale_of(a, b);
    V inverse = set1(s > 0 ? 1 / s : 0);
    uint32_t bits[kGroup];
    store((float*)bits, add(mul(a, inverse), set1(kMagic)));
    store((float*)bits + kLanes, add(mul(b, inverse), set1(kMagic)));
    int8_t q[kGroup];
    int32_t total = 0;
    for (int j = 0; j < kGroup; ++j) q[j] = (int8_t)(bits[j] & 0xff);
    for (int j = 0; j < kGroup; ++j) total += q[j];
    for (int j = 0; j < kGroup; j += 4) std::memcpy(q8 + (g * kGroup + j) * M, q + j, 4);
    scale[g * M] = s;
    sum[g * M] = total;
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

inline V get(const float* p) { return load(p); }
inline V get(const uint16_t* p) { return load_bf16(p); }
inline float one(const float* p) { return *p; }
inline float one(const uint16_t* p) {
  uint32_t u = (uint32_t)*p << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// q . k for N blocks of 16 positions: the terms of each in the order of d.
template <int N, class T>
void score_blocks(const float* query, const T* keys, size_t dim, float* scores) {
  V acc[N];
  for (auto& v : acc) v = zero();
  for (size_t d = 0; d < dim; ++d) {
    V q = set1(query[d]);
    for (int i = 0; i < N; ++i) acc[i] = fma(q, get(keys + (i * dim + d) * kLanes), acc[i]);
  }
  for (int i = 0; i < N; ++i) store(scores + i * kLanes, acc[i]);
}

template <class T>
void score(const float* query, const T* keys, size_t dim, size_t blocks, float* scores) {
  size_t b = 0;
  for (; b + 4 <= blocks; b += 4)
    score_blocks<4>(query, keys + b * dim * kLanes, dim, scores + b * kLanes);
  for (; b < blocks; ++b)
    score_blocks<1>(query, keys + b * dim * kLanes, dim, scores + b * kLanes);
}

template <int N, class T>  // N * 16 values from ``from`` on
void add_values(const Attention& a, size_t from) {
  V acc[N];
  for (auto& v : acc) v = zero();
  auto add = [&](const T* values, size_t begin, size_t end) {
    for (size_t j = begin; j < end; ++j, values += a.dim) {
      V weight = set1(a.scores[j]);
      for (int i = 0; i < N; ++i) acc[i] = fma(weight, get(values + i * kLanes), acc[i]);
    }
  };
  size_t tail = std::max(a.past, a.first);
  if (a.first < a.past) add((const T*)a.values + a.first * a.dim + from, a.first, a.past);
  add((const T*)a.tail_values + (tail - a.past) * a.dim + from, tail, a.count);
  for (int i = 0; i < N; ++i) store(a.out + from + i * kLanes, acc[i]);
}

template <class T>
void attend(const Attention& a) {
  size_t begin = a.first / kLanes, shared = a.past / kLanes;
  size_t end = (a.count + kLanes - 1) / kLanes, tail = std::max(begin, shared);
  if (begin < shared)
    score(a.query, (const T*)a.keys + begin * a.dim * kLanes, a.dim, shared - begin,
          a.scores + begin * kLanes);
  score(a.query, (const T*)a.tail_keys + (tail - shared) * a.dim * kLanes, a.dim, end - tail,
        a.scores + tail * kLanes);
  for (size_t j = begin * kLanes; j < end * kLanes; j += kLanes) {
    if (a.softcap > 0)
      store(a.scores + j,
            mul(tanh(div(load(a.scores + j), set1(a.softcap))), set1(a.softcap)));
    if (j < a.first || j + kLanes > a.count)  // what is not to be seen
      for (size_t i = j; i < j + kLanes; ++i)
        if (i < a.first || i >= a.count) a.scores[i] = -INFINITY;
  }
  float most = greatest(a.scores + begin * kLanes, (end - begin) * kLanes);
  V sums = zero();
  for (size_t j = begin * kLanes; j < end * kLanes; j += kLanes) {
    store(a.scores + j, exp(sub(load(a.scores + j), set1(most))));
    if (j < a.first || j + kLanes > a.count)  // exp has a floor
      for (size_t i = j; i < j + kLanes; ++i)
        if (i < a.first || i >= a.count) a.scores[i] = 0;
    sums = add(sums, load(a.scores + j));
  }
  size_t from = 0;
  for (; from + 4 * kLanes <= a.dim; from += 4 * kLanes) add_values<4, T>(a, from);
  for (; from + kLanes <= a.dim; from += kLanes) add_values<1, T>(a, from);
  for (; from < a.dim; ++from) {
    float acc = 0;
    for (size_t j = a.first; j < a.count; ++j) {
      const T* value = j < a.past ? (const T*)a.values + j * a.dim
                                  : (const T*)a.tail_values + (j - a.past) * a.dim;
      acc = std::fma(a.scores[j], one(value + from), acc);
    }
    a.out[from] = acc;
  }
  float total = 1.0f / sum_lanes(sums);
  for (size_t d = 0; d < a.dim; ++d) a.out[d] *= total;
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
