// What the native tests share. A failure is a line, and exit status 1 at the end.
#pragma once
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace slip {

inline int failures = 0;
inline std::mt19937 rng(7);

inline void expect(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

template <class Body>
void expect_refused(const Body& body, const std::string& what) {
  bool refused = false;
  try {
    body();
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  expect(refused, what);
}

inline std::vector<float> random_floats(size_t n, float scale = 1) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> v(n);
  for (auto& x : v) x = normal(rng);
  return v;
}

inline size_t below(size_t n) { return rng() % n; }

// Those that run on this processor; the portable ones first.
inline std::vector<const Kernels*> variants() {
  auto running = running_kernels();
  return {running.rbegin(), running.rend()};
}

inline std::string name_of(Format format) {
  const char* names[] = {"fp32", "bf16", "int8", "int4"};
  return names[(int)format];
}

inline int finish(const char* tests) {
  std::printf("%s:", tests);
  for (auto* kernels : variants()) std::printf(" %s", kernels->name);
  std::printf("; %d failures\n", failures);
  return failures ? 1 : 0;
}

}  // namespace slip
