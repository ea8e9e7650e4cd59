// What one instruction set brings: the product of a few rows with a block of packed columns.
//
// Y[m][n] = sum over k of X[m][k] * W[n][k]. Weights are packed in panels of 16 columns, k running
// fastest over the panel, so that a step streams them once and uses each for all rows while it is
// in a register. Every element adds its terms in the order of k, one fused multiply-add each (or,
// quantised, one group of 32 each): the result does not depend on M, on the neighbours, on the
// threads or on the instruction set, to the last bit.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace slip {

constexpr int kPanel = 16;  // columns of a panel
constexpr int kGroup = 32;  // k of a quantisation group
constexpr int kMaxRows = 16;

enum class Format { f32, bf16, int8, int4 };

// A few rows of activations, laid out for the kernels.
struct Rows {
  int count = 0;                 // M, 1 ... kMaxRows
  const float* f32 = nullptr;    // [K][M]
  const int8_t* q8 = nullptr;    // [K / 4][M][4]
  const float* scale = nullptr;  // [K / 32][M]: x = scale * q8
  const int32_t* start = nullptr;  // [K / 32][M]: -128 times the sum of q8 over the group
  const float* total = nullptr;    // [K / 32][M]: scale times that sum
};

// Packed weights; pointers to the first panel.
struct Columns {
  const void* w = nullptr;       // f32, bf16: [N/16][K][16]; int8: [N/16][K/4][16][4];
                                 // int4: [N/16][K/8][16][4], low nibbles k ... k+3, high k+4 ... k+7
  const uint16_t* scale = nullptr;  // fp16 [N/16][K/32][16]: int8 w = scale * q, int4 + shift
  const uint16_t* shift = nullptr;  // fp16 [N/16][K/32][16], int4 only
};

// Panels first ... last of the product: y[m * ld + 16 * panel + column], m < x.count.
using Product = void (*)(const Columns&, const Rows& x, size_t K, size_t first, size_t last,
                         float* y, size_t ld);

enum class Activation { silu, gelu_tanh, gelu };

constexpr size_t kMaxQueries = 16;  // of one call

// One row and head: it sees the positions first ... count - 1, those of this step in a tail, which
// begins with the block that holds the newest committed position's successor.
struct Query {
  const float* query;       // [D], scaled
  const void* tail_keys;    // [blocks][D][16], from the block of position ``past`` on
  const void* tail_values;  // [...][D], from position ``past`` on
  size_t first, count;
  float* scores;  // room for the greatest count, rounded up to 16
  float* out;     // [D]
};

// Queries that share a head of committed keys and values; those of a tail neighbour each other,
// their counts ascending. Sums run over positions in their order, in blocks cut by position:
// where a row lies in tree, batch or memory, and which queries go together, changes no bit.
struct Attention {
  const Query* queries;
  size_t n;            // 1 ... kMaxQueries
  const void* keys;    // committed, float or bf16, [capacity / 16][D][16]
  const void* values;  // committed, [capacity][D]
  size_t past;         // committed positions
  size_t dim;          // D
  float softcap;       // 0: none
};

struct Kernels {
  const char* name;
  Product product[4];  // by Format
  // y = x / rms(x) * w over n values
  void (*rms_norm)(const float* x, const float* w, size_t n, float eps, float* y);
  // y = (x - mean) / deviation * w + b
  void (*layer_norm)(const float* x, const float* w, const float* b, size_t n, float eps, float* y);
  // y = act(gate) * up; up may be null
  void (*activate)(Activation, const float* gate, const float* up, size_t n, float* y);
  void (*attend[2])(const Attention&);  // over keys and values in fp32, in bf16
  // a group of 32 values into what ``quantise`` keeps of them, and the rest
  void (*split)(const float* x, float* coarse, float* rest);
  // K values of a row, by groups of 32: x = scale * q8; four values to q8[k * M], of group g scale,
  // start and total (as in Rows) to place g * M
  void (*quantise)(const float* x, size_t K, size_t M, int8_t* q8, float* scale, int32_t* start,
                   float* total);
  // the greatest of n values
  float (*greatest)(const float* x, size_t n);
  // y = e^((x - top) * scale), 0 where the exponent is below ``bound``; returns the sum of y
  float (*exponentials)(const float* x, size_t n, float top, float scale, float bound, float* y);
};

const Kernels* avx512_kernels();  // null where not compiled in or not supported by this processor
const Kernels* avx2_kernels();
const Kernels* neon_kernels();
const Kernels* portable_kernels();
std::vector<const Kernels*> running_kernels();  // on this processor, the fastest first
// Those of a name, or the fastest that this processor runs; throws std::invalid_argument.
const Kernels& best_kernels(const std::string& name = "");

}  // namespace slip
