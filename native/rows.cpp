// Rows of logits or probabilities from Python: checked here, computed in sampling.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "checks.h"
#include "sampling.h"

namespace nb = nanobind;
using namespace slip;

namespace {

using Rows2 = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Row = nb::ndarray<const float, nb::ndim<1>, nb::device::cpu>;
using Result = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

void check(const Rows2& rows) {
  require(rows.shape(1) >= 1 && rows.stride(1) == 1, "rows must lie in one piece, and not be empty");
}

// A result of the rows' shape, filled row by row without the GIL.
template <class Fill>
Result each_row(const Rows2& rows, const Fill& fill) {
  check(rows);
  size_t count = rows.shape(0), width = rows.shape(1);
  std::unique_ptr<float[]> data(new float[count * width]);
  const float* from = rows.data();
  int64_t stride = rows.stride(0);
  {
    nb::gil_scoped_release free;
    for (size_t r = 0; r < count; ++r) fill(from + r * stride, width, data.get() + r * width);
  }
  float* out = data.release();
  nb::capsule owner(out, [](void* p) noexcept { delete[] (float*)p; });
  return Result(out, {count, width}, owner);
}

std::vector<int64_t> argmax_rows(const Rows2& rows, const std::string& kernels) {
  check(rows);
  const Kernels& k = best_kernels(kernels);
  std::vector<int64_t> best;
  for (size_t r = 0; r < rows.shape(0); ++r)
    best.push_back(argmax(k, rows.data() + r * rows.stride(0), rows.shape(1)));
  return best;
}

Result log_softmax_rows(const Rows2& rows, const std::string& kernels) {
  const Kernels& k = best_kernels(kernels);
  return each_row(rows, [&](const float* x, size_t n, float* y) { log_softmax(k, x, n, y); });
}

Result probability_rows(const Rows2& rows, float temperature, int64_t top_k, float top_p,
                        float min_p, const std::string& kernels) {
  const Kernels& k = best_kernels(kernels);
  Truncation t = truncation(temperature, top_k, top_p, min_p);
  std::vector<float> room;
  return each_row(rows,
                  [&](const float* x, size_t n, float* y) { probabilities(k, x, n, t, room, y); });
}

int64_t draw(const Row& probabilities, double uniform) {
  require(probabilities.shape(0) >= 1 && probabilities.stride(0) == 1,
          "probabilities must lie in one piece, and not be empty");
  return inverse_cdf(probabilities.data(), probabilities.shape(0), uniform);
}

}  // namespace

void bind_rows(nb::module_& m) {
  m.def("argmax", &argmax_rows, nb::arg("logits"), nb::arg("kernels") = "");
  m.def("log_softmax", &log_softmax_rows, nb::arg("logits"), nb::arg("kernels") = "");
  m.def("probabilities", &probability_rows, nb::arg("logits"), nb::arg("temperature"),
        nb::arg("top_k"), nb::arg("top_p"), nb::arg("min_p"), nb::arg("kernels") = "");
  m.def("inverse_cdf", &draw, nb::arg("probabilities"), nb::arg("uniform"));
}
