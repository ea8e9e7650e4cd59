// AVX-512 with VNNI. 32 registers of 16 floats.
#define SLIP_AVX512
#define SLIP_NAMESPACE avx512
#define SLIP_QUERIES 4
#define SLIP_BLOCKS 4
#include "kernels_impl.h"

const slip::Kernels* slip::avx512_kernels() {
  bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vnni");
  return runs ? avx512::kernels("avx512") : nullptr;
}
