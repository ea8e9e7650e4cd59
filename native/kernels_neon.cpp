// NEON, as every 64-bit Arm processor has it. 32 registers of 4 floats.
#define SLIP_NEON
#define SLIP_NAMESPACE neon
#define SLIP_QUERIES 2
#define SLIP_BLOCKS 2
#include "kernels_impl.h"

const slip::Kernels* slip::neon_kernels() { return neon::kernels("neon"); }
