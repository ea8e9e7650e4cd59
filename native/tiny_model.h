// Tiny random models, and a runner that steps them as the engine does: for the tests of the step.
#pragma once
#include <algorithm>

#include "step.h"
#include "testing.h"

namespace slip {

using Tokens = std::vector<int64_t>;

struct Shape {
  const char* name;
  size_t hidden, heads, kv_heads, dim, inner, vocab, layers, window;
  bool neox;    // layer norms, biases, no gate, both residuals at once
  bool gemma;   // soft caps, norms behind, of heads, tied head
};

inline std::unique_ptr<Matrix> random_matrix(size_t N, size_t K, Format format) {
  auto m = std::make_unique<Matrix>(N, K, format);
  m->set(0, N, random_floats(N * K, 0.3f).data(), Stored::f32);
  return m;
}

inline Norm random_norm(size_t n, bool bias) {
  Norm norm{random_floats(n, 0.2f), bias ? random_floats(n, 0.1f) : Floats{}};
  for (float& w : norm.weight) w += 1;
  return norm;
}

inline Layer random_layer(const Config& c, const Shape& s, Format format) {
  size_t query = c.heads * c.dim, kv = c.kv_heads * c.dim, up = c.inner * (c.gated ? 2 : 1);
  Layer l;
  l.before_attention = random_norm(c.hidden, s.neox);
  l.before_mlp = random_norm(c.hidden, s.neox);
  l.qkv = random_matrix(query + 2 * kv, c.hidden, format);
  l.out = random_matrix(c.hidden, query, format);
  l.up = random_matrix(up, c.hidden, format);
  l.down = random_matrix(c.hidden, c.inner, format);
  if (s.neox) {
    l.qkv_bias = random_floats(query + 2 * kv, 0.1f);
    l.out_bias = random_floats(c.hidden, 0.1f);
    l.up_bias = random_floats(up, 0.1f);
    l.down_bias = random_floats(c.hidden, 0.1f);
  }
  if (s.gemma) {
    l.after_attention = random_norm(c.hidden, false);
    l.after_mlp = random_norm(c.hidden, false);
    l.query_norm = random_norm(c.dim, false).weight;
    l.key_norm = random_norm(kv, false).weight;  // over all heads
  }
  return l;
}

inline Model random_model(const Shape& s, Format format) {
  Model m;
  Config& c = m.config;
  c.hidden = s.hidden, c.heads = s.heads, c.kv_heads = s.kv_heads, c.dim = s.dim;
  c.inner = s.inner, c.vocab = s.vocab, c.eps = 1e-5f;
  c.layer_norm = s.neox, c.gated = !s.neox, c.parallel_residual = s.neox;
  c.activation = s.neox ? Activation::gelu : s.gemma ? Activation::gelu_tanh : Activation::silu;
  c.query_scale = 0.5f, c.embedding_scale = s.gemma ? 2.0f : 1.0f;
  c.attention_softcap = s.gemma ? 20.0f : 0.0f, c.logit_softcap = s.gemma ? 10.0f : 0.0f;
  c.residual_scale = 1, c.logit_scale = s.neox ? 0.5f : 1.0f;
  size_t half = s.neox ? s.dim / 4 : s.dim / 2;  // partly rotated
  Rotary table;
  for (size_t i = 0; i < half; ++i) table.inverse_frequencies.push_back(1.0f / (1 + i * i));
  m.rotary.push_back(table);
  m.embedding = random_matrix(s.vocab, s.hidden, format);
  m.head = s.gemma ? m.embedding : std::shared_ptr<Matrix>(random_matrix(s.vocab, s.hidden, format));
  m.last = random_norm(s.hidden, s.neox);
  if (s.neox) m.head_bias = random_floats(s.vocab, 0.1f);
  for (size_t l = 0; l < s.layers; ++l) {
    m.layers.push_back(random_layer(c, s, format));
    m.layers.back().window = l % 2 ? 0 : s.window;
  }
  return m;
}

// New rows of one request; parents count from its first one.
struct Tree {
  size_t slot;
  Tokens tokens, parents;
};

inline Tree chain(size_t slot, const Tokens& tokens) {
  Tree tree{slot, tokens, {}};
  for (size_t i = 0; i < tokens.size(); ++i) tree.parents.push_back((int64_t)i - 1);
  return tree;
}

// One request after the other, logits of all rows, taps of all layers run.
inline Batch batch_of(const std::vector<Tree>& trees, const std::vector<size_t>& lengths,
                      size_t depth) {
  Batch batch{};
  batch.depth = depth;
  for (const Tree& tree : trees) {
    size_t start = batch.tokens.size();
    for (size_t i = 0; i < tree.tokens.size(); ++i) {
      int64_t parent = tree.parents[i];
      batch.wanted.push_back(start + i);
      batch.tokens.push_back(tree.tokens[i]);
      batch.parents.push_back(parent < 0 ? parent : (int64_t)start + parent);
      batch.slots.push_back(tree.slot);
      batch.past.push_back(lengths[tree.slot]);
    }
  }
  for (size_t l = 0; l <= depth; ++l) batch.taps.push_back(l);
  return batch;
}

class Runner {
 public:
  Runner(const Model& model, const Kernels& kernels, int threads, size_t slots, bool narrow)
      : model_(model),
        step_(model, kernels, threads),
        cache_(model, slots, narrow),
        lengths_(slots) {}

  const std::vector<size_t>& lengths() const { return lengths_; }
  const Cache& cache() const { return cache_; }
  size_t depth() const { return model_.layers.size(); }
  void run(const Batch& batch, Output& out) { step_.run(batch, cache_, out); }
  Output run(const Batch& batch) {
    Output out;
    run(batch, out);
    return out;
  }
  // Room for exactly what is there: every commit is likely to move the slot.
  void commit(const Output& out, size_t slot, const std::vector<size_t>& rows) {
    size_t kv = model_.config.kv_heads * model_.config.dim, &length = lengths_[slot];
    cache_.reserve(slot, length + rows.size());
    for (size_t l = 0; l < depth(); ++l)
      for (size_t i = 0; i < rows.size(); ++i)
        cache_.put(l, slot, length + i, &out.keys[l][rows[i] * kv], &out.values[l][rows[i] * kv]);
    length += rows.size();
  }
  // Read a text in one go; returns what the step gave.
  Output read(size_t slot, const Tokens& tokens) {
    Output out = run(batch_of({chain(slot, tokens)}, lengths_, depth()));
    std::vector<size_t> rows(tokens.size());
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = i;
    commit(out, slot, rows);
    return out;
  }

 private:
  const Model& model_;
  Step step_;
  Cache cache_;
  std::vector<size_t> lengths_;
};

}  // namespace slip
