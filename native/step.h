// The functional step of the Llama-like family: tokens, tree and committed KV in; logits and the
// KV of the new tokens out; nothing changed.
#pragma once
#include <memory>
#include <vector>

#include "pack.h"
#include "threads.h"

namespace slip {

using Floats = std::vector<float>;  // empty: not there

struct Norm {
  Floats weight, bias;
};

struct Layer {
  Norm before_attention, after_attention, before_mlp, after_mlp;
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
  Floats embedding;  // [vocab][hidden]
  std::vector<Layer> layers;
  std::vector<Rotary> rotary;
  Norm last;
  std::unique_ptr<Matrix> head;
  Floats head_bias;
};

// Committed KV: slots of `capacity` positions.
class Cache {
 public:
  Cache(const Model& model, size_t slots, size_t capacity);
  size_t slots() const { return slots_; }
  size_t capacity() const { return capacity_; }
  float* keys(size_t layer, size_t slot, size_t head);    // [capacity / 16][dim][16]
  float* values(size_t layer, size_t slot, size_t head);  // [capacity][dim]
  // Append one row (k, v: [kv_heads * dim]) of a layer at a position.
  void put(size_t layer, size_t slot, size_t position, const float* k, const float* v);

 private:
  size_t slots_, capacity_, heads_, dim_;
  std::vector<Floats> keys_, values_;  // a layer each
};

// All rows of a step, request after request.
struct Batch {
  std::vector<int64_t> tokens;
  std::vector<int64_t> parents;  // row of the parent, -1 for the newest committed token
  std::vector<size_t> slots;     // of each row
  std::vector<size_t> past;      // committed tokens of its slot
  std::vector<size_t> wanted;    // rows whose logits are asked for
};

struct Output {
  Floats logits;                     // [wanted][vocab]
  std::vector<Floats> keys, values;  // a layer each, [rows][kv_heads * dim]
};

class Step {
 public:
  Step(const Model& model, const Kernels& kernels, int threads);
  Output run(const Batch& batch, Cache& cache);

 private:
  void product(const Matrix& w, const Floats& bias, const float* x, size_t rows, float* y);
  void norm(const Norm& n, const float* x, size_t rows, float* y);
  void prepare_angles();
  void prepare_heads(const Layer& layer, float* qkv, const Batch& batch, Output& out, size_t l);
  void attend(const Layer& layer, size_t l, const float* qkv, const Batch& batch, Cache& cache,
              const Output& out, float* y);
  void mlp(const Layer& layer, const float* x, size_t rows, float* y);
  void add(float* x, const float* y, size_t n, float scale);

  const Model& model_;
  const Kernels& kernels_;
  Pool pool_;
  std::vector<Activations> arranged_;
  std::vector<std::vector<size_t>> paths_;  // rows from the top of the tree to each row
  std::vector<size_t> positions_;
  std::vector<Floats> angles_;  // a rotary table each, [rows][cosine, sine][half]
  std::vector<Floats> scores_;  // a thread each
  Floats padded_;
};

}  // namespace slip
