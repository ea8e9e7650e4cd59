// The kernels, written once on vec.h; included by one file for each instruction set.
#pragma once
#include "attention_impl.h"
#include "kernels.h"
#include "rows_impl.h"
#include "vec.h"

namespace slip {
namespace SLIP_NAMESPACE {

// Integer dot products of 16 columns with the same 4 activations, added to 16 sums. Exact.
#if defined(SLIP_AVX512)
struct Sums {
  __m512i v;
};
inline Sums no_sums() { return {_mm512_setzero_si512()}; }
inline V to_float(Sums s) { return {_mm512_cvtepi32_ps(s.v)}; }
inline __m512i four(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return _mm512_set1_epi32(word);
}
// vpdpbusd multiplies unsigned by signed: w + 128 by x, beginning at -128 times the sum of x
inline Sums start8(int32_t start) { return {_mm512_set1_epi32(start)}; }
inline Sums dot8(Sums s, const int8_t* w, const int8_t* x) {
  __m512i raised = _mm512_xor_si512(_mm512_loadu_si512(w), _mm512_set1_epi8(-128));
  return {_mm512_dpbusd_epi32(s.v, raised, four(x))};
}
inline Sums dot4(Sums s, const uint8_t* w, const int8_t* x0, const int8_t* x1) {
  __m512i wv = _mm512_loadu_si512(w), low = _mm512_set1_epi8(15);
  s.v = _mm512_dpbusd_epi32(s.v, _mm512_and_si512(wv, low), four(x0));
  wv = _mm512_and_si512(_mm512_srli_epi16(wv, 4), low);
  return {_mm512_dpbusd_epi32(s.v, wv, four(x1))};
}
#elif defined(SLIP_AVX2)
struct Sums {
  __m256i a, b;
};
inline Sums no_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline V to_float(Sums s) { return {_mm256_cvtepi32_ps(s.a), _mm256_cvtepi32_ps(s.b)}; }
inline __m256i four(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}
// maddubs saturates at 16 bits: 2 * 128 * 127 and 2 * 15 * 127 stay below
inline __m256i dot(__m256i s, __m256i u, __m256i i) {
  __m256i pairs = _mm256_maddubs_epi16(u, i);
  return _mm256_add_epi32(s, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Sums dot8(Sums s, const int8_t* w, const int8_t* x) {
  __m256i xv = four(x);
  __m256i a = _mm256_loadu_si256((const __m256i*)w);
  __m256i b = _mm256_loadu_si256((const __m256i*)(w + 32));
  return {dot(s.a, _mm256_abs_epi8(a), _mm256_sign_epi8(xv, a)),
          dot(s.b, _mm256_abs_epi8(b), _mm256_sign_epi8(xv, b))};
}
inline Sums dot4(Sums s, const uint8_t* w, const int8_t* from0, const int8_t* from1) {
  __m256i low = _mm256_set1_epi8(15), x0 = four(from0), x1 = four(from1);
  __m256i a = _mm256_loadu_si256((const __m256i*)w);
  __m256i b = _mm256_loadu_si256((const __m256i*)(w + 32));
  s = {dot(s.a, _mm256_and_si256(a, low), x0), dot(s.b, _mm256_and_si256(b, low), x0)};
  a = _mm256_and_si256(_mm256_srli_epi16(a, 4), low);
  b = _mm256_and_si256(_mm256_srli_epi16(b, 4), low);
  return {dot(s.a, a, x1), dot(s.b, b, x1)};
}
inline Sums start8(int32_t) { return no_sums(); }
#else
struct Sums {
  int32_t i[16];
};
inline Sums no_sums() { return {}; }
inline Sums start8(int32_t) { return no_sums(); }
inline V to_float(Sums s) {
  float f[16];
  for (int c = 0; c < 16; ++c) f[c] = (float)s.i[c];
  return load(f);
}
inline Sums dot8(Sums s, const int8_t* w, const int8_t* x) {
  for (int c = 0; c < 16; ++c)
    for (int j = 0; j < 4; ++j) s.i[c] += w[c * 4 + j] * x[j];
  return s;
}
inline Sums dot4(Sums s, const uint8_t* w, const int8_t* x0, const int8_t* x1) {
  for (int c = 0; c < 16; ++c)
    for (int j = 0; j < 4; ++j)
      s.i[c] += (w[c * 4 + j] & 15) * x0[j] + (w[c * 4 + j] >> 4) * x1[j];
  return s;
}
#endif

// Bytes of weights read ahead. Far: the many rows' arithmetic on what lies between keeps the
// processor from looking ahead itself.
constexpr size_t kAhead = 8192;

// M rows with one panel of floating-point weights. One panel at a time, here and below: weights
// come from memory in one stream, and several are slower.
template <class T, int M>
void float_panel(const Columns& c, const Rows& x, size_t K, size_t panel, float* y, size_t ld) {
  const auto* w = (const T*)c.w + panel * K * kPanel;
  const float* from = x.f32;
  V acc[M];
  for (auto& a : acc) a = zero();
  for (size_t k = 0; k < K; ++k, w += kPanel, from += M) {
    prefetch((const char*)w + kAhead);
    V b = get(w);
    for (int m = 0; m < M; ++m) acc[m] = fma(set1(from[m]), b, acc[m]);
  }
  for (int m = 0; m < M; ++m) store(y + m * ld, acc[m]);
}

// M rows with one panel of quantised weights.
template <bool Four, int M>
void int_panel(const Columns& c, const Rows& x, size_t K, size_t panel, float* y, size_t ld) {
  constexpr size_t kStep = Four ? 8 : 4;  // k in 64 bytes of weights
  const auto* w = (const int8_t*)c.w + panel * (K / kStep) * 64;
  const uint16_t* scale = c.scale + panel * (K / kGroup) * kPanel;
  const uint16_t* shift = Four ? c.shift + panel * (K / kGroup) * kPanel : nullptr;
  V acc[M];
  for (auto& a : acc) a = zero();
  for (size_t g = 0; g < K / kGroup; ++g) {
    Sums sums[M];
    for (int m = 0; m < M; ++m) sums[m] = Four ? no_sums() : start8(x.start[g * M + m]);
    const int8_t* q8 = x.q8 + g * kGroup * M;
#pragma GCC unroll 8  // or the sums are moved from register to register
    for (size_t step = 0; step < kGroup / kStep; ++step, w += 64, q8 += kStep * M) {
      prefetch(w + kAhead);
      for (int m = 0; m < M; ++m)
        if constexpr (Four)
          sums[m] = dot4(sums[m], (const uint8_t*)w, q8 + m * 4, q8 + (M + m) * 4);
        else
          sums[m] = dot8(sums[m], w, q8 + m * 4);
    }
    V s = load_half(scale + g * kPanel);
    for (int m = 0; m < M; ++m)
      acc[m] = fma(to_float(sums[m]), mul(s, set1(x.scale[g * M + m])), acc[m]);
    if constexpr (Four) {
      V b = load_half(shift + g * kPanel);
      for (int m = 0; m < M; ++m) acc[m] = fma(b, set1(x.total[g * M + m]), acc[m]);
    }
  }
  for (int m = 0; m < M; ++m) store(y + m * ld, acc[m]);
}

// From the number of rows at run time to the kernel made for it.
template <template <int> class Kernel, int M = kMaxRows>
void by_rows(const Columns& c, const Rows& x, size_t K, size_t first, size_t last, float* y,
             size_t ld) {
  if (x.count == M) {
    for (size_t p = first; p < last; ++p) Kernel<M>::run(c, x, K, p, y + p * kPanel, ld);
    return;
  }
  if constexpr (M > 1) by_rows<Kernel, M - 1>(c, x, K, first, last, y, ld);
}

#define SLIP_KERNEL(name, function)                                                       \
  template <int M>                                                                        \
  struct name {                                                                           \
    static void run(const Columns& c, const Rows& x, size_t K, size_t panel, float* y,    \
                    size_t ld) {                                                          \
      function(c, x, K, panel, y, ld);                                                    \
    }                                                                                     \
  };
SLIP_KERNEL(F32Rows, (float_panel<float, M>))
SLIP_KERNEL(BF16Rows, (float_panel<uint16_t, M>))
SLIP_KERNEL(Int8Rows, (int_panel<false, M>))
SLIP_KERNEL(Int4Rows, (int_panel<true, M>))
#undef SLIP_KERNEL

inline const Kernels* kernels(const char* name) {
  static const Kernels table{
      name,
      {by_rows<F32Rows>, by_rows<BF16Rows>, by_rows<Int8Rows>, by_rows<Int4Rows>},
      rms_norm,
      layer_norm,
      activate,
      {attend<float>, attend<uint16_t>},
      split,
      quantise,
      greatest,
      exponentials};
  return &table;
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
