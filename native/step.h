// The functional step of the Llama-like family: tokens, tree and committed KV in; logits and the
// KV of the new tokens out; nothing changed.
#pragma once
#include <memory>
#include <vector>

#include "pack.h"
#include "threads.h"

namespace slip {

using Floats = std::vector<float>;  // empty: not there
using Bytes = std::vector<uint8_t>;

struct Norm {
  Floats weight, bias;
};

struct Layer {
  Norm before_attention, after_attention, before_mlp, after_mlp;
  Norm hidden;  // of an EAGLE-3 head's layer, which takes token and hidden state side by side
  std::unique_ptr<Matrix> qkv, out, up, down;  // up: gate above up where the MLP is gated
  Floats qkv_bias, out_bias, up_bias, down_bias;
  Floats query_norm, key_norm;  // over a head, or over all heads where they are that long
  size_t window = 0;            // 0: full attention
  size_t rotary = 0;            // which table
};

struct Rotary {
  Floats inverse_frequencies;  // half the rotated dimensions
  float scale = 1;             // of cosine and sine
};

struct Config {
  size_t hidden, heads, kv_heads, dim, inner, vocab;
  float eps;
  bool layer_norm, gated, parallel_residual;
  Activation activation;
  float query_scale, attention_softcap, logit_softcap;  // caps: 0 for none
  float embedding_scale, residual_scale, logit_scale;
};

struct Model {
  Config config;
  std::shared_ptr<Matrix> embedding, head;  // the same where they are tied
  std::vector<Layer> layers;
  std::vector<Rotary> rotary;
  Norm last;
  Floats head_bias;
  // Of an EAGLE-3 head alone (Li et al. 2025, arXiv 2503.01840):
  std::unique_ptr<Matrix> fuse;     // features of the target -> hidden state
  std::vector<int64_t> target_ids;  // of the tokens that its logits are of
  bool normed_residual = false;     // the residual is the hidden state after its norm

  size_t logits() const { return head->rows(); }  // of a row
};

// Committed KV: slots that grow alone, of fp32 or (narrow) bf16 numbers.
class Cache {
 public:
  Cache(const Model& model, size_t slots, bool narrow);
  bool narrow() const { return narrow_; }
  size_t slots() const { return slots_.size(); }
  size_t capacity(size_t slot) const { return slots_[slot].capacity; }
  size_t bytes() const;
  void reserve(size_t slot, size_t capacity);
  const void* keys(size_t layer, size_t slot, size_t head) const;    // [capacity / 16][dim][16]
  const void* values(size_t layer, size_t slot, size_t head) const;  // [capacity][dim]
  // Store one row (k, v: [kv_heads * dim]) of a layer at a position below the capacity.
  void put(size_t layer, size_t slot, size_t position, const float* k, const float* v);

 private:
  struct Slot {
    size_t capacity = 0;
    std::vector<Bytes> keys, values;  // a layer each
  };
  size_t layers_, heads_, dim_, size_;  // size: bytes of a number
  bool narrow_;
  std::vector<Slot> slots_;
};

// New rows of a step, request after request.
struct Batch {
  std::vector<int64_t> tokens;
  std::vector<int64_t> parents;  // a row of this output, -1 for the newest committed token
  std::vector<size_t> slots;     // of each row
  std::vector<size_t> past;      // committed tokens of its slot
  std::vector<size_t> wanted;    // which of these rows' logits are asked for
  std::vector<size_t> taps;      // layers whose input is asked for; the number of layers: the last
  size_t depth;                  // layers to run, at most all
  Floats hidden;                 // [rows][hidden] for an EAGLE-3 head, of the position before each
};

// What a step computed; ``run`` again adds rows below the earlier ones, as a drafter does.
struct Output {
  Floats logits;                     // [wanted][logits of a row], of the newest rows
  Floats features;                   // [rows][taps][hidden], of the newest rows
  std::vector<Floats> keys, values;  // a layer each, [all rows][kv_heads * dim]
  std::vector<int64_t> parents;      // of all rows
  std::vector<size_t> positions;
};

class Step {
 public:
  // Steps may share a pool, one running at a time: two would spin on the same cores.
  Step(const Model& model, const Kernels& kernels, std::shared_ptr<Pool> pool);
  Step(const Model& model, const Kernels& kernels, int threads)
      : Step(model, kernels, std::make_shared<Pool>(threads)) {}
  void run(const Batch& batch, const Cache& cache, Output& out);
  // An EAGLE-3 head's: rows of features of the target -> hidden states.
  void fuse(const float* features, size_t rows, float* hidden);
  const Kernels& kernels() const { return kernels_; }
  const std::shared_ptr<Pool>& pool() const { return shared_; }

 private:
  // The KV of a row's ancestors in the layout of the cache, from the block of its first position.
  struct Tail {
    size_t slot, past, blocks;
    std::vector<size_t> rows;  // of the output, in order of position
    Bytes keys, values;        // [kv_heads][blocks * 16 * dim], [kv_heads][rows][dim]
  };

  // Neighbouring new rows on the same committed tokens.
  struct Run {
    size_t first, rows;
  };

  void product(const Matrix& w, const Floats& bias, const float* x, size_t rows, float* y);
  void fine_product(const Matrix& w, const Floats& bias, const float* x, size_t rows, float* y);
  void norm(const Norm& n, const float* x, size_t rows, float* y);
  void join(const Layer& layer, const Batch& batch, float* x, float* both);
  void prepare_angles(const Output& out, size_t first);
  void prepare_tails(const Batch& batch, const Output& out, size_t first, const Cache& cache);
  void prepare_shares(const Output& out, size_t first);
  void prepare_heads(const Layer& layer, float* qkv, const Batch& batch, Output& out, size_t l,
                     size_t first, bool narrow);
  void fill_tails(size_t l, const Cache& cache, const Output& out);
  template <class T>
  void fill_tail(Tail& tail, size_t group, size_t l, const Cache& cache, const Output& out);
  void attend(const Layer& layer, size_t l, const float* qkv, const Cache& cache,
              const Output& out, size_t first, float* y);
  void mlp(const Layer& layer, const float* x, size_t rows, float* y);
  void add(float* x, const float* y, size_t n, float scale);

  const Model& model_;
  const Kernels& kernels_;
  std::shared_ptr<Pool> shared_;
  Pool& pool_;
  std::vector<Activations> arranged_;
  std::vector<Tail> tails_;
  std::vector<Run> runs_;
  std::vector<size_t> tail_of_, run_of_;  // of each new row
  std::vector<size_t> shares_;  // of attention: the first query of each thread, and the end
  std::vector<Floats> angles_;   // a rotary table each, [new rows][cosine, sine][half]
  std::vector<Floats> scores_;   // a thread each
  Floats padded_, up_, inner_, halves_, sums_;
};

}  // namespace slip
