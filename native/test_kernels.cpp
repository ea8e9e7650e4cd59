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

// Queries over ``past`` committed positions and a tail of ``news`` more. Query i sees positions
// first ... past + i / 3, as three heads of a chain do.
struct Scene {
  size_t dim, past, news, first, room = 0;
  std::vector<float> queries, keys, values;  // [n][D], [position][D], [position][D]

  Scene(size_t dim_, size_t past_, size_t news_, size_t first_)
      : dim(dim_), past(past_), news(news_), first(first_) {
    size_t count = past + news;
    room = (count + kPanel - 1) / kPanel * kPanel;
    queries = random_floats(3 * news * dim);
    keys = random_floats(count * dim);
    values = random_floats(count * dim);
  }

  // Rows of keys from ``start`` (a multiple of 16) to ``end`` as the kernels read them.
  std::vector<float> panels(size_t start, size_t end) const {
    std::vector<float> out((room - start) * dim, NAN);
    for (size_t j = start; j < end; ++j)
      for (size_t d = 0; d < dim; ++d)
        out[((j - start) / kPanel * dim + d) * kPanel + j % kPanel] = keys[j * dim + d];
    return out;
  }

  // Queries begin ... end - 1 in one call. What only the newest row sees is no number.
  std::vector<float> attend(const Kernels& kernels, size_t begin, size_t end) const {
    size_t last = past + (end - 1) / 3 + 1;
    auto committed = panels(0, past), tail = panels(past / kPanel * kPanel, last);
    std::vector<float> of_tail(values.begin() + past * dim, values.end());
    std::fill(of_tail.begin() + (last - 1 - past) * dim, of_tail.end(), NAN);
    if (begin / 3 == (end - 1) / 3) of_tail = {values.begin() + past * dim, values.end()};
    std::vector<float> scores((end - begin) * room, NAN), out((end - begin) * dim, NAN);
    std::vector<Query> some;
    for (size_t i = begin; i < end; ++i)
      some.push_back({&queries[i * dim], tail.data(), of_tail.data(), first, past + i / 3 + 1,
                      &scores[(i - begin) * room], &out[(i - begin) * dim]});
    kernels.attend[0]({some.data(), some.size(), committed.data(), values.data(), past, dim, 0});
    return out;
  }

  double exact(size_t i, size_t d) const {
    double total = 0, sum = 0;
    for (size_t j = first; j <= past + i / 3; ++j) {
      double score = 0;
      for (size_t k = 0; k < dim; ++k) score += (double)queries[i * dim + k] * keys[j * dim + k];
      total += std::exp(score);
      sum += std::exp(score) * values[j * dim + d];
    }
    return sum / total;
  }
};

void check_attention(const Scene& scene) {
  size_t n = 3 * scene.news, dim = scene.dim;
  std::vector<float> alone;
  for (size_t i = 0; i < n; ++i) {
    auto one = scene.attend(*portable_kernels(), i, i + 1);
    alone.insert(alone.end(), one.begin(), one.end());
  }
  for (size_t i = 0; i < n * dim; ++i)
    if (!(std::fabs(alone[i] - scene.exact(i / dim, i % dim)) < 1e-4))
      return slip::expect(false, "attention is the softmax over what is seen");
  for (auto* kernels : variants())
    for (size_t end = 1; end <= n; ++end)
      for (size_t begin = end < kMaxQueries ? 0 : end - kMaxQueries; begin < end; ++begin) {
        auto out = scene.attend(*kernels, begin, end);
        bool one_row = begin / 3 == (end - 1) / 3;
        size_t seen = (one_row ? end : (end - 1) / 3 * 3) - begin;
        slip::expect(same_bits(out.data(), &alone[begin * dim], seen * dim),
                     std::string("a query has the same bits in any company, ") + kernels->name);
      }
}

}  // namespace

int main() {
  const size_t shapes[][2] = {{16, 32}, {1, 32}, {50, 96}, {160, 576}};
  for (auto& shape : shapes)
    for (Format format : {Format::f32, Format::bf16, Format::int8, Format::int4})
      check(shape[0], shape[1], format);
  check_exact_bf16();
  for (size_t dim : {8, 40, 64, 128})
    for (size_t past : {0, 5, 16, 47, 200})
      for (size_t first : {0, 3})
        if (first <= past) check_attention({dim, past, 7, first});
  check_attention({16, 9, 7, 9});  // a window that ends where the step begins
  return finish("kernels");
}
