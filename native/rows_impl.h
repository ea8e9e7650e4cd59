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

// e^x within 2 units in the last place; x below -87 gives what -87 gives.
inline V exp(V x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the bits
  x = max(min(x, set1(88.0f)), set1(-87.0f));
  V shifted = fma(x, set1(1.44269504f), set1(magic));
  V n = sub(shifted, set1(magic));
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

// q · k for 16 positions at once, or for one: the same terms in the same order.
inline V score_block(const float* query, const float* keys, size_t dim) {
  V acc = zero();
  for (size_t d = 0; d < dim; ++d) acc = fma(set1(query[d]), load(keys + d * kLanes), acc);
  return acc;
}
inline float score_one(const float* query, const float* key, size_t dim) {
  float acc = 0;
  for (size_t d = 0; d < dim; ++d) acc = std::fma(query[d], key[d], acc);
  return acc;
}

template <int N>
void add_values(const Attention& a, size_t begin, size_t from) {  // N * 16 values from ``from`` on
  V acc[N];
  for (auto& v : acc) v = zero();
  for (size_t j = begin; j < a.past + a.ancestors; ++j) {
    const float* value = j < a.past ? a.values + j * a.dim : a.new_values[j - a.past];
    V weight = set1(a.scores[j]);
    for (int i = 0; i < N; ++i) acc[i] = fma(weight, load(value + from + i * kLanes), acc[i]);
  }
  for (int i = 0; i < N; ++i) store(a.out + from + i * kLanes, acc[i]);
}

inline void attend(const Attention& a) {
  size_t count = a.past + a.ancestors, block = a.first / kLanes * kLanes;
  for (size_t j = block; j < a.past; j += kLanes)
    store(a.scores + j, score_block(a.query, a.keys + j * a.dim, a.dim));
  for (size_t i = 0; i < a.ancestors; ++i)
    a.scores[a.past + i] = score_one(a.query, a.new_keys[i], a.dim);
  if (a.softcap > 0)
    for (size_t j = block; j < count; j += kLanes) {
      V capped = mul(tanh(div(load(a.scores + j), set1(a.softcap))), set1(a.softcap));
      store_up_to(a.scores + j, capped, count - j);
    }
  float most = a.scores[count - 1];
  for (size_t j = a.first; j < count; ++j) most = std::max(most, a.scores[j]);
  for (size_t j = count; j % kLanes; ++j) a.scores[j] = most;  // not to be read as numbers else
  V sums = zero();
  for (size_t j = block; j < count; j += kLanes) {
    V e = exp(sub(load(a.scores + j), set1(most)));
    store(a.scores + j, e);
    for (size_t i = j; i < a.first; ++i) a.scores[i] = 0;
    for (size_t i = count; i < j + kLanes; ++i) a.scores[i] = 0;
    sums = add(sums, load(a.scores + j));
  }
  size_t from = 0;
  for (; from + 4 * kLanes <= a.dim; from += 4 * kLanes) add_values<4>(a, a.first, from);
  for (; from + kLanes <= a.dim; from += kLanes) add_values<1>(a, a.first, from);
  for (; from < a.dim; ++from) {
    float acc = 0;
    for (size_t j = a.first; j < count; ++j) {
      const float* value = j < a.past ? a.values + j * a.dim : a.new_values[j - a.past];
      acc = std::fma(a.scores[j], value[from], acc);
    }
    a.out[from] = acc;
  }
  float total = 1.0f / sum_lanes(sums);
  for (size_t d = 0; d < a.dim; ++d) a.out[d] *= total;
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
