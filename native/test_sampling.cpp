// Tests of rows of logits against the definitions, in double precision.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "sampling.h"
#include "testing.h"

using namespace slip;

namespace {

constexpr float kNone = std::numeric_limits<float>::quiet_NaN();

std::vector<double> normalised(std::vector<double> p) {
  double total = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& v : p) v /= total;
  return p;
}

// Each cut on what the one before left over; values as great as the last one kept are kept.
std::vector<double> by_definition(const std::vector<float>& logits, const Truncation& t) {
  double most = *std::max_element(logits.begin(), logits.end());
  std::vector<double> p;
  for (float x : logits) p.push_back(std::exp((x - most) / t.temperature));
  p = normalised(p);
  auto keep = [&](double least) {
    for (double& v : p) v = v >= least * (1 - 1e-12) ? v : 0;
    p = normalised(p);
  };
  if (t.min_p > 0) keep(t.min_p * *std::max_element(p.begin(), p.end()));
  auto sorted = p;
  std::sort(sorted.rbegin(), sorted.rend());
  if (t.top_k > 0 && t.top_k < p.size()) keep(sorted[t.top_k - 1]);
  if (t.top_p < 1) {
    sorted = p;
    std::sort(sorted.rbegin(), sorted.rend());
    double mass = 0;
    size_t i = 0;
    for (; i < sorted.size() && mass < t.top_p; ++i) mass += sorted[i];
    keep(sorted[i - 1]);
  }
  return p;
}

void check_probabilities(const Kernels& k) {
  const Truncation cuts[] = {{1, 0, 1, 0},       {0.6f, 0, 1, 0},      {1, 5, 1, 0},
                             {1, 0, 0.8f, 0},    {1, 0, 1, 0.05f},     {1.5f, 20, 0.93f, 0.02f},
                             {0.01f, 0, 0.5f, 0}};
  for (size_t n : {1, 2, 15, 16, 17, 33, 1000, 5000})
    for (const Truncation& t : cuts) {
      auto logits = random_floats(n, 3);
      std::vector<float> room, got(n);
      probabilities(k, logits.data(), n, t, room, got.data());
      auto want = by_definition(logits, t);
      double gap = 0;
      for (size_t i = 0; i < n; ++i) gap = std::max(gap, std::abs(got[i] - want[i]));
      expect(gap < 2e-6, std::string(k.name) + ": probabilities, n = " + std::to_string(n));
    }
}

void check_greatest(const Kernels& k) {
  for (size_t n : {1, 15, 16, 17, 1000}) {
    auto logits = random_floats(n);
    size_t at = below(n);
    logits[at] = 9;
    if (n > 1) logits[n - 1 - (at == n - 1)] = 9;  // as great as the other: the first counts
    size_t first = std::find(logits.begin(), logits.end(), 9.0f) - logits.begin();
    expect(argmax(k, logits.data(), n) == first, "the first of the greatest");
    std::vector<float> got(n);
    log_softmax(k, logits.data(), n, got.data());
    double total = 0;
    for (float x : got) total += std::exp((double)x);
    expect(std::abs(total - 1) < 1e-5, "probabilities add up");
    std::fill(logits.begin(), logits.end(), kNone);
    expect(argmax(k, logits.data(), n) < n, "no numbers at all: still a token");
  }
}

void check_draws() {
  for (size_t n : {1, 7, 1023, 1024, 1025, 5000}) {
    auto p = random_floats(n);
    for (float& v : p) v = v < 0 ? 0 : v;
    p[below(n)] = 1;
    double total = std::accumulate(p.begin(), p.end(), 0.0);
    for (int i = 0; i < 200; ++i) {
      double uniform = i ? (double)below(1 << 30) / (1 << 30) : 1 - 1e-17, sum = 0;
      size_t got = inverse_cdf(p.data(), n, uniform);
      for (size_t j = 0; j < got; ++j) sum += p[j];
      expect(p[got] > 0, "never a token of probability 0");
      expect(sum <= uniform * total + 1e-9 && sum + p[got] >= uniform * total - 1e-9,
             "a draw inverts the distribution, n = " + std::to_string(n));
    }
  }
}

void check_refusals() {
  auto refused = [](float t, int64_t k, float top_p, float min_p, const char* what) {
    expect_refused([&] { truncation(t, k, top_p, min_p); }, what);
  };
  refused(-1, 0, 1, 0, "a temperature below 0");
  refused(kNone, 0, 1, 0, "a temperature that is no number");
  refused(1, 0, 0, 0, "top_p of 0");
  refused(1, 0, kNone, 0, "top_p that is no number");
  refused(1, 0, 1, 1.5f, "min_p above 1");
  expect(truncation(1, -1, 1, 0).top_k == 0, "top_k below 0 leaves all in");
}

}  // namespace

int main() {
  for (auto* kernels : variants()) {
    check_probabilities(*kernels);
    check_greatest(*kernels);
  }
  check_draws();
  check_refusals();
  return finish("sampling");
}
