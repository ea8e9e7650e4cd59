// Tests of the packed product; run by `make check-native`, also under sanitizers.
#include <cmath>

#include "pack.h"
#include "testing.h"

using namespace slip;

namespace {

void expect(bool holds, const char* what, const char* kernels, Format format, int rows) {
  slip::expect(holds, std::string(what) + " (" + kernels + ", " + name_of(format) + ", " +
                          std::to_string(rows) + " rows)");
}

std::vector<float> product(const Kernels& kernels, const Matrix& w, const float* x, int rows) {
  Activations room;
  size_t ld = w.panels() * kPanel;
  std::vector<float> y(rows * ld);
  Rows arranged = room.arrange(kernels, x, rows, w.columns(), w.format());
  auto* kernel = kernels.product[(int)w.format()];
  size_t middle = w.panels() / 3;  // two ranges, as two threads would take them
  kernel(w.view(), arranged, w.columns(), 0, middle, y.data(), ld);
  kernel(w.view(), arranged, w.columns(), middle, w.panels(), y.data(), ld);
  return y;
}

bool same_bits(const float* a, const float* b, size_t n) { return !std::memcmp(a, b, n * 4); }

// The allowed error of one element: rounding of a sum, and of the quantisation of both sides.
double tolerance(Format format, size_t K) {
  double root = std::sqrt((double)K);
  switch (format) {
    case Format::f32:
      return 1e-5 * root;
    case Format::bf16:
      return 0.01 * root;
    case Format::int8:
      return 0.05 * root;
    default:
      return 0.6 * root;
  }
}

void check(size_t N, size_t K, Format format) {
  auto w = random_floats(N * K), x = random_floats(kMaxRows * K);
  Matrix packed(N, K, format);
  packed.set(0, N, w.data(), Stored::f32);
  size_t ld = packed.panels() * kPanel;
  auto reference = product(*portable_kernels(), packed, x.data(), kMaxRows);
  for (int m = 0; m < kMaxRows; ++m)
    for (size_t n = 0; n < N; ++n) {
      double exact = 0;
      for (size_t k = 0; k < K; ++k) exact += (double)x[m * K + k] * w[n * K + k];
      if (std::fabs(exact - reference[m * ld + n]) > tolerance(format, K))
        return expect(false, "the product is the matrix product", "portable", format, m);
    }
  for (auto* kernels : variants())
    for (int rows = 1; rows <= kMaxRows; ++rows) {
      auto y = product(*kernels, packed, x.data(), rows);
      bool same = same_bits(y.data(), reference.data(), rows * ld);
      expect(same, "a row has the same bits in any company", kernels->name, format, rows);
      auto last = product(*kernels, packed, x.data() + (rows - 1) * K, 1);
      same = same_bits(last.data(), reference.data() + (rows - 1) * ld, ld);
      expect(same, "a row has the same bits alone", kernels->name, format, rows);
    }
}

void check_exact_bf16() {
  auto w = random_floats(32 * 48);
  for (auto& v : w) {  // values that bf16 holds exactly
    uint32_t u;
    std::memcpy(&u, &v, 4);
    u &= 0xffff0000;
    std::memcpy(&v, &u, 4);
  }
  auto x = random_floats(3 * 48);
  Matrix a(32, 48, Format::f32), b(32, 48, Format::bf16);
  a.set(0, 32, w.data(), Stored::f32);
  b.set(0, 32, w.data(), Stored::f32);
  auto wide = product(*portable_kernels(), a, x.data(), 3);
  auto narrow = product(*portable_kernels(), b, x.data(), 3);
  expect(wide == narrow, "bf16 weights are widened exactly", "portable", Format::bf16, 3);
}

}  // namespace

int main() {
  const size_t shapes[][2] = {{16, 32}, {1, 32}, {50, 96}, {160, 576}};
  for (auto& shape : shapes)
    for (Format format : {Format::f32, Format::bf16, Format::int8, Format::int4})
      check(shape[0], shape[1], format);
  check_exact_bf16();
  return finish("kernels");
}
