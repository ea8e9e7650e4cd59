// Tests of packing: half precision, and what a matrix keeps of floats and of GGUF blocks.
#include <algorithm>
#include <cmath>
#include <limits>

#include "pack.h"
#include "testing.h"

using namespace slip;

namespace {

constexpr Stored kBlocks[] = {Stored::q4_0, Stored::q4_1, Stored::q8_0};

std::string name_of(Stored stored) {
  const char* names[] = {"fp32", "bf16", "Q4_0", "Q4_1", "Q8_0"};
  return names[(int)stored];
}

// By the definition of IEEE 754's binary16.
double value_of(int half) {
  int exponent = half >> 10 & 31, fraction = half & 1023;
  double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  if (exponent == 31) size = fraction ? NAN : INFINITY;
  return half & 0x8000 ? -size : size;
}

void check_all_halves() {
  for (int half = 0; half < 65536; ++half) {
    double want = value_of(half);
    float got = half_to_float((uint16_t)half);
    std::string which = " (half " + std::to_string(half) + ")";
    if (std::isnan(want)) {
      expect(std::isnan(got), "NaN stays NaN" + which);
      expect(std::isnan(value_of(float_to_half(got))), "NaN comes back" + which);
      continue;
    }
    expect(got == want && std::signbit(got) == std::signbit(want), "a half is widened" + which);
    expect(float_to_half(got) == half, "a half comes back" + which);
  }
}

// Between every two neighbours: below the middle, above it, and the middle itself, to even.
void check_rounding_to_halves() {
  for (int half = 0; half < 0x7c00; ++half) {
    double next = half + 1 < 0x7c00 ? value_of(half + 1) : 65536;
    auto middle = (float)((value_of(half) + next) / 2);
    int even = half & 1 ? half + 1 : half;
    bool right = float_to_half(middle) == even && float_to_half(-middle) == (even | 0x8000) &&
                 float_to_half(std::nextafter(middle, 0.0f)) == half &&
                 float_to_half(std::nextafter(middle, INFINITY)) == half + 1;
    expect(right, "halves are rounded to the nearest (half " + std::to_string(half) + ")");
  }
  expect(float_to_half(std::numeric_limits<float>::max()) == 0x7c00, "too large is infinite");
}

void check_rounding_to_bf16() {
  for (uint32_t high = 0; high < 65536; ++high) {
    float exact, middle, above;
    uint32_t bits[] = {high << 16, high << 16 | 0x8000, high << 16 | 0x8001};
    std::memcpy(&exact, &bits[0], 4);
    std::memcpy(&middle, &bits[1], 4);
    std::memcpy(&above, &bits[2], 4);
    if (std::isnan(middle)) {
      expect((float_to_bf16(middle) & 0x7fff) > 0x7f80, "NaN stays NaN");
      continue;
    }
    uint32_t even = high + (high & 1);
    bool right = float_to_bf16(exact) == high && float_to_bf16(middle) == even &&
                 float_to_bf16(above) == high + 1;
    expect(right, "bf16 is rounded to the nearest (" + std::to_string(high) + ")");
  }
}

// A scale or shift of any size, also subnormal; eight times as much is still finite.
uint16_t random_half() {
  return (uint16_t)((rng() & 0x8000) | below(0x6c00));
}

std::vector<uint8_t> random_blocks(size_t N, size_t K, Stored stored) {
  std::vector<uint8_t> rows(N * row_bytes(stored, K));
  for (auto& byte : rows) byte = (uint8_t)rng();
  size_t block = row_bytes(stored, kGroup);
  for (size_t at = 0; at < rows.size(); at += block) {
    uint16_t halves[] = {random_half(), random_half()};
    std::memcpy(&rows[at], halves, stored == Stored::q4_1 ? 4 : 2);
  }
  return rows;
}

// Weight j of a block, by the definition of the format.
float dequantised(const uint8_t* block, size_t j, Stored stored) {
  uint16_t d, m;
  std::memcpy(&d, block, 2);
  std::memcpy(&m, block + 2, 2);
  if (stored == Stored::q8_0) return (float)(value_of(d) * (int8_t)block[2 + j]);
  uint8_t both = block[(stored == Stored::q4_1 ? 4 : 2) + j % 16];
  int q = j < 16 ? both & 15 : both >> 4;
  if (stored == Stored::q4_0) return (float)(value_of(d) * (q - 8));
  return (float)(value_of(d) * q + value_of(m));
}

void check_blocks(Stored stored) {
  const size_t N = 35, K = 96, first = 7;  // in two parts that share a panel
  auto rows = random_blocks(N, K, stored);
  size_t bytes = row_bytes(stored, K), block = row_bytes(stored, kGroup);
  Matrix m(N, K, stored == Stored::q8_0 ? Format::int8 : Format::int4);
  m.set(first, N - first, &rows[first * bytes], stored);
  m.set(0, first, rows.data(), stored);
  std::vector<float> row(K);
  for (size_t n = 0; n < N; ++n) {
    m.row(n, row.data());
    bool same = true;
    for (size_t k = 0; k < K; ++k)
      same &= row[k] == dequantised(&rows[n * bytes + k / kGroup * block], k % kGroup, stored);
    expect(same, name_of(stored) + " is carried over exactly, row " + std::to_string(n));
  }
}

// All instruction sets read the same scales, subnormal ones too.
void check_product_of_blocks(Stored stored) {
  const size_t N = 16, K = 64;
  auto rows = random_blocks(N, K, stored);
  Matrix m(N, K, stored == Stored::q8_0 ? Format::int8 : Format::int4);
  m.set(0, N, rows.data(), stored);
  auto x = random_floats(K);
  std::vector<float> want(N), got(N);
  for (auto* kernels : variants()) {
    Activations room;
    Rows arranged = room.arrange(*kernels, x.data(), 1, K, m.format());
    kernels->product[(int)m.format()](m.view(), arranged, K, 0, 1, got.data(), N);
    if (kernels == portable_kernels()) want = got;
    bool same = !std::memcmp(got.data(), want.data(), N * 4);
    expect(same, name_of(stored) + " gives the same product with " + kernels->name);
  }
}

// How far a packed weight may be from the one that went in.
float allowed(Format format, const float* group, float weight) {
  auto [low, high] = std::minmax_element(group, group + kGroup);
  float most = std::max(*high, -*low);
  if (format == Format::f32) return 0;
  if (format == Format::bf16) return std::fabs(weight) / 256;
  float step = format == Format::int8 ? most / 127 : (*high - *low) / 15;
  return step / 2 + most / 1000;  // scale and shift are halves
}

void check_floats(Format format) {
  const size_t N = 21, K = 64;
  auto w = random_floats(N * K);
  std::fill(w.begin(), w.begin() + kGroup, 0.0f);            // a group of zeros
  std::fill(w.begin() + K, w.begin() + K + kGroup, -0.75f);  // one of equal weights
  Matrix m(N, K, format);
  m.set(0, N, w.data(), Stored::f32);
  std::vector<float> row(K);
  for (size_t n = 0; n < N; ++n) {
    m.row(n, row.data());
    bool near = true;
    for (size_t k = 0; k < K; ++k) {
      float error = std::fabs(row[k] - w[n * K + k]);
      near &= error <= allowed(format, &w[n * K + k / kGroup * kGroup], w[n * K + k]);
    }
    expect(near, "floats are packed as " + name_of(format) + ", row " + std::to_string(n));
  }
}

void check_refusals() {
  std::vector<uint8_t> rows(4096);
  for (Format format : {Format::int8, Format::int4})
    expect_refused([&] { Matrix(1, 40, format); }, "half a group is refused");
  expect_refused([] { Matrix(0, 32, Format::f32); }, "no rows are refused");
  expect_refused([] { Matrix(1, 0, Format::f32); }, "no columns are refused");
  for (Format format : {Format::f32, Format::bf16, Format::int8, Format::int4})
    for (Stored stored : kBlocks) {
      bool fits = format == (stored == Stored::q8_0 ? Format::int8 : Format::int4);
      auto set = [&](size_t first) { Matrix(2, 32, format).set(first, 2, rows.data(), stored); };
      std::string what = name_of(stored) + " into " + name_of(format);
      if (fits)
        set(0);
      else
        expect_refused([&] { set(0); }, what + " is refused");
      expect_refused([&] { set(1); }, what + ": a row too many is refused");
    }
}

}  // namespace

int main() {
  check_all_halves();
  check_rounding_to_halves();
  check_rounding_to_bf16();
  for (Stored stored : kBlocks) {
    check_blocks(stored);
    check_product_of_blocks(stored);
  }
  for (Format format : {Format::f32, Format::bf16, Format::int8, Format::int4})
    check_floats(format);
  check_refusals();
  return finish("packing");
}
