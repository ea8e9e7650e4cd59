// AVX2 with FMA. 16 registers of 8 floats.
#define SLIP_AVX2
#define SLIP_NAMESPACE avx2
#define SLIP_QUERIES 2
#define SLIP_BLOCKS 2
#include "kernels_impl.h"

const slip::Kernels* slip::avx2_kernels() {
  bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return runs ? avx2::kernels("avx2") : nullptr;
}
