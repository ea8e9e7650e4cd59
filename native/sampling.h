// Rows of logits: the best token, the distribution that a request samples from, a draw from it.
// The reference of each is in Python: sampling.py and noise.py.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace slip {

// As in SamplingParams; top_k 0 and top_p 1 leave everything in.
struct Truncation {
  float temperature;
  size_t top_k;
  float top_p, min_p;
};

// Checks the values that a user may have set; throws std::invalid_argument.
Truncation truncation(float temperature, int64_t top_k, float top_p, float min_p);

size_t argmax(const Kernels& kernels, const float* logits, size_t n);  // the first of the greatest
void log_softmax(const Kernels& kernels, const float* logits, size_t n, float* out);
// Temperature, min-p, top-k, top-p, softmax. Tokens as probable as the last one kept are kept.
void probabilities(const Kernels& kernels, const float* logits, size_t n, const Truncation& t,
                   std::vector<float>& room, float* out);
// The first token whose cumulated probability exceeds uniform * sum; never one of probability 0.
size_t inverse_cdf(const float* probabilities, size_t n, double uniform);

}  // namespace slip
