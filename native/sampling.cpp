#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "checks.h"

namespace slip {

namespace {

constexpr float kColdest = 1e-30f;  // below any temperature that makes a difference
constexpr float kFloor = -87.0f;    // e to the power of less is not a normal float

// The k-th greatest value.
float kth(const float* x, size_t n, size_t k, std::vector<float>& room) {
  room.resize(k);
  std::partial_sort_copy(x, x + n, room.begin(), room.end(), std::greater<float>());
  return room.back();
}

// The least of the fewest, most probable weights that make up ``share`` of all.
float last_of_nucleus(const float* weights, size_t n, double total, float share,
                      std::vector<float>& room) {
  for (float cut : {1e-3f, 1e-6f, 0.0f}) {  // most often a few weights hold the share: sort those
    room.clear();
    double mass = 0;
    for (size_t i = 0; i < n; ++i)
      if (weights[i] > cut) {
        room.push_back(weights[i]);
        mass += weights[i];
      }
    if (cut == 0 || mass > 1.0001 * share * total) break;
  }
  std::sort(room.begin(), room.end(), std::greater<float>());
  double ahead = 0;
  size_t last = 0;
  for (size_t i = 0; i < room.size() && (i == 0 || ahead < share * total); ++i) {
    last = i;
    ahead += room[i];
  }
  return room[last];
}

}  // namespace

Truncation truncation(float temperature, int64_t top_k, float top_p, float min_p) {
  require(temperature >= 0 && std::isfinite(temperature), "temperature must be 0 or more");
  require(top_p > 0 && top_p <= 1 && min_p >= 0 && min_p <= 1, "top_p or min_p is out of range");
  return {temperature, top_k > 0 ? (size_t)top_k : 0, top_p, min_p};
}

size_t argmax(const Kernels& kernels, const float* logits, size_t n) {
  float most = kernels.greatest(logits, n);
  size_t at = std::find(logits, logits + n, most) - logits;
  return at < n ? at : 0;  // not a number anywhere: any token is as good
}

void log_softmax(const Kernels& kernels, const float* logits, size_t n, float* out) {
  float most = kernels.greatest(logits, n);
  float total = std::log(kernels.exponentials(logits, n, most, 1, kFloor, out));
  for (size_t i = 0; i < n; ++i) out[i] = logits[i] - most - total;
}

void probabilities(const Kernels& kernels, const float* logits, size_t n, const Truncation& t,
                   std::vector<float>& room, float* out) {
  float most = kernels.greatest(logits, n), scale = 1 / std::max(t.temperature, kColdest);
  float bound = t.min_p > 0 ? std::max(kFloor, std::log(t.min_p)) : kFloor;
  if (t.top_k > 0 && t.top_k < n)
    bound = std::max(bound, (kth(logits, n, t.top_k, room) - most) * scale);
  double total = kernels.exponentials(logits, n, most, scale, bound, out);
  if (t.top_p < 1) {
    float last = last_of_nucleus(out, n, total, t.top_p, room);
    total = 0;
    for (size_t i = 0; i < n; ++i) {
      if (out[i] < last) out[i] = 0;
      if (out[i] > 0) total += out[i];
    }
  }
  float inverse = (float)(1 / total);
  for (size_t i = 0; i < n; ++i) out[i] *= inverse;
}

size_t inverse_cdf(const float* probabilities, size_t n, double uniform) {
  constexpr size_t kBlock = 1024, kSums = 8;
  std::vector<double> blocks;
  double total = 0;
  for (size_t from = 0; from < n; from += kBlock) {
    size_t end = std::min(n, from + kBlock), i = from;
    double sums[kSums] = {};  // several chains: one would wait for each addition
    for (; i + kSums <= end; i += kSums)
      for (size_t j = 0; j < kSums; ++j) sums[j] += probabilities[i + j];
    for (; i < end; ++i) sums[0] += probabilities[i];
    for (double sum : sums) total += sum;
    blocks.push_back(total);
  }
  double target = uniform * total;
  size_t block = std::upper_bound(blocks.begin(), blocks.end(), target) - blocks.begin();
  block = std::min(block, blocks.size() - 1);  // uniform * total rounded up to total
  double before = block ? blocks[block - 1] : 0;
  size_t found = n;
  for (size_t i = block * kBlock; i < std::min(n, (block + 1) * kBlock) && before <= target; ++i) {
    before += probabilities[i];
    if (probabilities[i] > 0) found = i;
  }
  if (found == n)
    for (found = n - 1; found > 0 && !(probabilities[found] > 0);) --found;
  return found;
}

}  // namespace slip
