// Sixteen floats, in whatever registers the target has. Every operation acts lane by lane and is
// correctly rounded, so a kernel written on it gives the same bits on every processor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <cmath>
#if defined(SLIP_AVX512) || defined(SLIP_AVX2)
#include <immintrin.h>
#elif defined(SLIP_NEON)
#include <arm_neon.h>
#endif

namespace slip {
float half_to_float(uint16_t half);  // pack.cpp

namespace SLIP_NAMESPACE {

// Lanes are folded as a tree: i with i + 8, then i + 4, i + 2, i + 1.
#if defined(SLIP_AVX512) || defined(SLIP_AVX2)
template <class Fold>
float fold_eight(__m256 a, const Fold& fold) {
  __m128 v = fold(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  v = fold(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(fold(v, _mm_shuffle_ps(v, v, 1)));
}
inline float sum_eight(__m256 a) {
  return fold_eight(a, [](__m128 x, __m128 y) { return _mm_add_ps(x, y); });
}
inline float max_eight(__m256 a) {
  return fold_eight(a, [](__m128 x, __m128 y) { return _mm_max_ps(x, y); });
}
#else
template <class Fold>
float fold_lanes(float* f, const Fold& fold) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) f[i] = fold(f[i], f[i + half]);
  return f[0];
}
#endif

#if defined(SLIP_AVX512)
struct V {
  __m512 v;
};
inline V zero() { return {_mm512_setzero_ps()}; }
inline V set1(float x) { return {_mm512_set1_ps(x)}; }
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline V load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline V load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
inline V shift_to_exponent(V a) {  // bits << 23, plus the bits of 1.0
  __m512i one = _mm512_set1_epi32(0x3f800000);
  return {_mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(a.v), 23), one))};
}
inline void store_low_bytes(int8_t* p, V a) {  // of the bits of each lane
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_castps_si512(a.v)));
}
inline __m256 lower(V a) { return _mm512_castps512_ps256(a.v); }
inline __m256 upper(V a) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
}
inline float sum_lanes(V a) { return sum_eight(_mm256_add_ps(lower(a), upper(a))); }
inline float max_lanes(V a) {  // of those that are numbers
  a = max(a, set1(-INFINITY));
  return max_eight(_mm256_max_ps(lower(a), upper(a)));
}
#elif defined(SLIP_AVX2)
struct V {
  __m256 a, b;
};
inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 widen(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline V load_bf16(const uint16_t* p) { return {widen(p), widen(p + 8)}; }
inline V load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline void store(float* p, V x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline V fma(V x, V y, V z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline __m256 shift_half(__m256 a) {
  __m256i one = _mm256_set1_epi32(0x3f800000);
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(a), 23), one));
}
inline V shift_to_exponent(V x) { return {shift_half(x.a), shift_half(x.b)}; }
inline void store_low_bytes(int8_t* p, V x) {
  __m256i low = _mm256_set1_epi32(0xff);
  __m256i a = _mm256_and_si256(_mm256_castps_si256(x.a), low);
  __m256i b = _mm256_and_si256(_mm256_castps_si256(x.b), low);
  __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
  __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i*)p, bytes);
}
inline float sum_lanes(V x) { return sum_eight(_mm256_add_ps(x.a, x.b)); }
inline float max_lanes(V x) {  // of those that are numbers
  x = max(x, set1(-INFINITY));
  return max_eight(_mm256_max_ps(x.a, x.b));
}
#elif defined(SLIP_NEON)
struct V {
  float32x4_t q[4];
};
inline V set1(float x) {
  float32x4_t v = vdupq_n_f32(x);
  return {{v, v, v, v}};
}
inline V zero() { return set1(0); }
inline V load(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
inline V load_bf16(const uint16_t* p) {
  V r;
  for (int i = 0; i < 4; ++i)
    r.q[i] = vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(p + 4 * i)), 16));
  return r;
}
inline V load_half(const uint16_t* p) {
  V r;
  for (int i = 0; i < 4; ++i)
    r.q[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
  return r;
}
inline void store(float* p, V a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.q[i]);
}
inline V fma(V a, V b, V c) {
  for (int i = 0; i < 4; ++i) c.q[i] = vfmaq_f32(c.q[i], a.q[i], b.q[i]);
  return c;
}
inline V mul(V a, V b) {
  for (int i = 0; i < 4; ++i) a.q[i] = vmulq_f32(a.q[i], b.q[i]);
  return a;
}
inline V add(V a, V b) {
  for (int i = 0; i < 4; ++i) a.q[i] = vaddq_f32(a.q[i], b.q[i]);
  return a;
}
inline V sub(V a, V b) {
  for (int i = 0; i < 4; ++i) a.q[i] = vsubq_f32(a.q[i], b.q[i]);
  return a;
}
inline V div(V a, V b) {
  for (int i = 0; i < 4; ++i) a.q[i] = vdivq_f32(a.q[i], b.q[i]);
  return a;
}
inline V max(V a, V b) {
  for (int i = 0; i < 4; ++i) a.q[i] = vmaxq_f32(a.q[i], b.q[i]);
  return a;
}
inline V min(V a, V b) {
  for (int i = 0; i < 4; ++i) a.q[i] = vminq_f32(a.q[i], b.q[i]);
  return a;
}
inline V shift_to_exponent(V a) {
  for (auto& q : a.q)
    q = vreinterpretq_f32_u32(
        vaddq_u32(vshlq_n_u32(vreinterpretq_u32_f32(q), 23), vdupq_n_u32(0x3f800000)));
  return a;
}
inline void store_low_bytes(int8_t* p, V a) {
  for (int i = 0; i < 4; ++i) {
    uint32_t bits[4];
    vst1q_u32(bits, vreinterpretq_u32_f32(a.q[i]));
    for (int j = 0; j < 4; ++j) p[4 * i + j] = (int8_t)(bits[j] & 0xff);
  }
}
#else
struct V {
  float f[16];
};
inline V zero() { return {}; }
inline V set1(float x) {
  V r;
  for (auto& f : r.f) f = x;
  return r;
}
inline V load(const float* p) {
  V r;
  std::memcpy(r.f, p, 64);
  return r;
}
inline V load_bf16(const uint16_t* p) {
  V r;
  for (int i = 0; i < 16; ++i) {
    uint32_t u = (uint32_t)p[i] << 16;
    std::memcpy(&r.f[i], &u, 4);
  }
  return r;
}
inline V load_half(const uint16_t* p) {
  V r;
  for (int i = 0; i < 16; ++i) r.f[i] = half_to_float(p[i]);
  return r;
}
inline void store(float* p, V a) { std::memcpy(p, a.f, 64); }
inline V fma(V a, V b, V c) {
  for (int i = 0; i < 16; ++i) c.f[i] = std::fma(a.f[i], b.f[i], c.f[i]);
  return c;
}
inline V mul(V a, V b) {
  for (int i = 0; i < 16; ++i) a.f[i] *= b.f[i];
  return a;
}
inline V add(V a, V b) {
  for (int i = 0; i < 16; ++i) a.f[i] += b.f[i];
  return a;
}
inline V sub(V a, V b) {
  for (int i = 0; i < 16; ++i) a.f[i] = a.f[i] - b.f[i];
  return a;
}
inline V div(V a, V b) {
  for (int i = 0; i < 16; ++i) a.f[i] = a.f[i] / b.f[i];
  return a;
}
inline V max(V a, V b) {
  for (int i = 0; i < 16; ++i) a.f[i] = a.f[i] > b.f[i] ? a.f[i] : b.f[i];
  return a;
}
inline V min(V a, V b) {
  for (int i = 0; i < 16; ++i) a.f[i] = a.f[i] < b.f[i] ? a.f[i] : b.f[i];
  return a;
}
inline V shift_to_exponent(V a) {
  for (auto& f : a.f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    u = (u << 23) + 0x3f800000;
    std::memcpy(&f, &u, 4);
  }
  return a;
}
inline void store_low_bytes(int8_t* p, V a) {
  for (int i = 0; i < 16; ++i) {
    uint32_t u;
    std::memcpy(&u, &a.f[i], 4);
    p[i] = (int8_t)(u & 0xff);
  }
}
#endif
#if !defined(SLIP_AVX512) && !defined(SLIP_AVX2)
inline float sum_lanes(V a) {
  float f[16];
  store(f, a);
  return fold_lanes(f, [](float x, float y) { return x + y; });
}
inline float max_lanes(V a) {  // of those that are numbers
  float f[16];
  store(f, a);
  for (float& v : f) v = v > -INFINITY ? v : -INFINITY;
  return fold_lanes(f, [](float x, float y) { return x > y ? x : y; });
}
#endif
}  // namespace SLIP_NAMESPACE
}  // namespace slip
