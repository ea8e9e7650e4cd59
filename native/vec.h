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
#endif
}  // namespace SLIP_NAMESPACE
}  // namespace slip
