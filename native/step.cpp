#include "step.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace slip {

Cache::Cache(const Model& model, size_t slots, size_t capacity)
    : slots_(slots),
      capacity_((capacity + kPanel - 1) / kPanel * kPanel),
      heads_(model.config.kv_heads),
      dim_(model.config.dim) {
  for (size_t l = 0; l < model.layers.size(); ++l) {
    keys_.emplace_back(slots * heads_ * capacity_ * dim_);
    values_.emplace_back(slots * heads_ * capacity_ * dim_);
  }
}

float* Cache::keys(size_t layer, size_t slot, size_t head) {
  return keys_[layer].data() + (slot * heads_ + head) * capacity_ * dim_;
}

float* Cache::values(size_t layer, size_t slot, size_t head) {
  return values_[layer].data() + (slot * heads_ + head) * capacity_ * dim_;
}

void Cache::put(size_t layer, size_t slot, size_t position, const float* k, const float* v) {
  for (size_t h = 0; h < heads_; ++h) {
    float* block = keys(layer, slot, h) + position / kPanel * kPanel * dim_ + position % kPanel;
    for (size_t d = 0; d < dim_; ++d) block[d * kPanel] = k[h * dim_ + d];
    std::memcpy(values(layer, slot, h) + position * dim_, v + h * dim_, dim_ * 4);
  }
}

Step::Step(const Model& model, const Kernels& kernels, int threads)
    : model_(model), kernels_(kernels), pool_(threads), scores_(pool_.threads()) {}

// Y = X·Wᵀ + bias for any number of rows. Threads take panels; a panel is used for all blocks of
// rows while it is in the cache.
void Step::product(const Matrix& w, const Floats& bias, const float* x, size_t rows, float* y) {
  size_t blocks = (rows + kMaxRows - 1) / kMaxRows, N = w.rows(), ld = w.panels() * kPanel;
  if (arranged_.size() < blocks) arranged_.resize(blocks);
  std::vector<Rows> parts(blocks);
  pool_.run(blocks, [&](size_t begin, size_t end, int) {
    for (size_t b = begin; b < end; ++b) {
      int count = (int)std::min<size_t>(kMaxRows, rows - b * kMaxRows);
      parts[b] = arranged_[b].arrange(x + b * kMaxRows * w.columns(), count, w.columns(), w.format());
    }
  });
  bool whole = ld == N;
  if (!whole) padded_.resize(rows * ld);
  float* to = whole ? y : padded_.data();
  Product kernel = kernels_.product[(int)w.format()];
  constexpr size_t kTogether = 8;  // panels
  pool_.run(w.panels(), [&](size_t begin, size_t end, int) {
    for (size_t p = begin; p < end; p += kTogether)
      for (size_t b = 0; b < blocks; ++b)
        kernel(w.view(), parts[b], w.columns(), p, std::min(p + kTogether, end),
               to + b * kMaxRows * ld, ld);
  });
  for (size_t m = 0; m < rows && (!whole || !bias.empty()); ++m) {
    if (!whole) std::memcpy(y + m * N, to + m * ld, N * 4);
    for (size_t n = 0; n < bias.size(); ++n) y[m * N + n] += bias[n];
  }
}

void Step::norm(const Norm& n, const float* x, size_t rows, float* y) {
  size_t width = n.weight.size();
  const float *weight = n.weight.data(), *bias = n.bias.empty() ? nullptr : n.bias.data();
  pool_.run(rows, [&](size_t begin, size_t end, int) {
    for (size_t r = begin; r < end; ++r) {
      const float* from = x + r * width;
      if (model_.config.layer_norm)
        kernels_.layer_norm(from, weight, bias, width, model_.config.eps, y + r * width);
      else
        kernels_.rms_norm(from, weight, width, model_.config.eps, y + r * width);
    }
  });
}

// Cosine and sine of every row and table, once a step: [rows][2][half].
void Step::prepare_angles() {
  angles_.resize(model_.rotary.size());
  for (size_t t = 0; t < angles_.size(); ++t) {
    const Rotary& table = model_.rotary[t];
    size_t half = table.inverse_frequencies.size();
    angles_[t].resize(positions_.size() * 2 * half);
    pool_.run(positions_.size(), [&](size_t begin, size_t end, int) {
      for (size_t r = begin; r < end; ++r)
        for (size_t i = 0; i < half; ++i) {
          float angle = (float)positions_[r] * table.inverse_frequencies[i];
          angles_[t][2 * r * half + i] = std::cos(angle) * table.scale;
          angles_[t][(2 * r + 1) * half + i] = std::sin(angle) * table.scale;
        }
    });
  }
}

// Halves rotated against each other, as transformers' rotate_half does; the rest is left alone.
static void rotate(float* head, const float* cosine, const float* sine, size_t half) {
  for (size_t i = 0; i < half; ++i) {
    float a = head[i], b = head[i + half];
    head[i] = a * cosine[i] - b * sine[i];
    head[i + half] = b * cosine[i] + a * sine[i];
  }
}

// Query and key norms and rotation, in place; the new keys and values are copied out.
void Step::prepare_heads(const Layer& layer, float* qkv, const Batch& batch, Output& out,
                         size_t l) {
  const Config& c = model_.config;
  size_t width = (c.heads + 2 * c.kv_heads) * c.dim, kv = c.kv_heads * c.dim;
  const Floats& angles = angles_[layer.rotary];
  size_t half = model_.rotary[layer.rotary].inverse_frequencies.size();
  auto normalise = [&](float* x, size_t heads, const Floats& w) {
    if (w.empty()) return;
    for (size_t at = 0; at < heads * c.dim; at += w.size())
      kernels_.rms_norm(x + at, w.data(), w.size(), c.eps, x + at);
  };
  pool_.run(batch.tokens.size(), [&](size_t begin, size_t end, int) {
    for (size_t r = begin; r < end; ++r) {
      float *query = qkv + r * width, *key = query + c.heads * c.dim, *value = key + kv;
      normalise(query, c.heads, layer.query_norm);
      normalise(key, c.kv_heads, layer.key_norm);
      const float* cosine = angles.data() + 2 * r * half;
      for (size_t h = 0; h < c.heads + c.kv_heads; ++h)
        rotate(query + h * c.dim, cosine, cosine + half, half);
      for (size_t i = 0; i < c.heads * c.dim; ++i) query[i] *= c.query_scale;
      std::memcpy(out.keys[l].data() + r * kv, key, kv * 4);
      std::memcpy(out.values[l].data() + r * kv, value, kv * 4);
    }
  });
}

void Step::attend(const Layer& layer, size_t l, const float* qkv, const Batch& batch, Cache& cache,
                  const Output& out, float* y) {
  const Config& c = model_.config;
  size_t width = (c.heads + 2 * c.kv_heads) * c.dim, kv = c.kv_heads * c.dim;
  pool_.run(batch.tokens.size() * c.heads, [&](size_t begin, size_t end, int thread) {
    std::vector<const float*> new_keys, new_values;
    for (size_t item = begin; item < end; ++item) {
      size_t r = item / c.heads, h = item % c.heads, g = h / (c.heads / c.kv_heads);
      new_keys.clear();
      new_values.clear();
      for (size_t row : paths_[r]) {
        new_keys.push_back(out.keys[l].data() + row * kv + g * c.dim);
        new_values.push_back(out.values[l].data() + row * kv + g * c.dim);
      }
      size_t count = batch.past[r] + paths_[r].size(), position = positions_[r];
      Floats& scores = scores_[thread];
      if (scores.size() < count + 2 * kPanel) scores.resize(2 * count + 2 * kPanel);
      bool cut = layer.window && position >= layer.window;
      kernels_.attend({qkv + r * width + h * c.dim, cache.keys(l, batch.slots[r], g),
                       cache.values(l, batch.slots[r], g), new_keys.data(), new_values.data(),
                       batch.past[r], paths_[r].size(), cut ? position - layer.window + 1 : 0,
                       c.dim, c.attention_softcap, scores.data(), y + item * c.dim});
    }
  });
}

void Step::mlp(const Layer& layer, const float* x, size_t rows, float* y) {
  const Config& c = model_.config;
  size_t width = c.gated ? 2 * c.inner : c.inner;
  Floats up(rows * width), inner(rows * c.inner);
  product(*layer.up, layer.up_bias, x, rows, up.data());
  pool_.run(rows, [&](size_t begin, size_t end, int) {
    for (size_t r = begin; r < end; ++r) {
      const float* gate = up.data() + r * width;
      kernels_.activate(c.activation, gate, c.gated ? gate + c.inner : nullptr, c.inner,
                        inner.data() + r * c.inner);
    }
  });
  product(*layer.down, layer.down_bias, inner.data(), rows, y);
}

void Step::add(float* x, const float* y, size_t n, float scale) {
  for (size_t i = 0; i < n; ++i) x[i] += scale * y[i];
}

Output Step::run(const Batch& batch, Cache& cache) {
  const Config& c = model_.config;
  size_t rows = batch.tokens.size(), kv = c.kv_heads * c.dim, n = rows * c.hidden;
  paths_.assign(rows, {});
  positions_.resize(rows);
  for (size_t r = 0; r < rows; ++r) {
    if (batch.parents[r] >= 0) paths_[r] = paths_[batch.parents[r]];
    paths_[r].push_back(r);
    positions_[r] = batch.past[r] + paths_[r].size() - 1;
  }
  prepare_angles();
  Floats x(n), normed(n), y(n), qkv(rows * (c.heads + 2 * c.kv_heads) * c.dim),
      mixed(rows * c.heads * c.dim);
  for (size_t r = 0; r < rows; ++r)
    for (size_t i = 0; i < c.hidden; ++i)
      x[r * c.hidden + i] = model_.embedding[batch.tokens[r] * c.hidden + i] * c.embedding_scale;
  Output out;
  for (size_t l = 0; l < model_.layers.size(); ++l) {
    const Layer& layer = model_.layers[l];
    out.keys.emplace_back(rows * kv);
    out.values.emplace_back(rows * kv);
    auto norm_or_copy = [&](const Norm& norm_, const float* from, float* to) {
      if (norm_.weight.empty())
        std::memcpy(to, from, n * 4);
      else
        norm(norm_, from, rows, to);
    };
    norm_or_copy(layer.before_attention, x.data(), normed.data());
    product(*layer.qkv, layer.qkv_bias, normed.data(), rows, qkv.data());
    prepare_heads(layer, qkv.data(), batch, out, l);
    attend(layer, l, qkv.data(), batch, cache, out, mixed.data());
    product(*layer.out, layer.out_bias, mixed.data(), rows, y.data());
    if (!layer.after_attention.weight.empty()) norm(layer.after_attention, y.data(), rows, y.data());
    Floats attention = c.parallel_residual ? y : Floats();
    if (!c.parallel_residual) add(x.data(), y.data(), n, c.residual_scale);
    norm_or_copy(layer.before_mlp, x.data(), normed.data());
    mlp(layer, normed.data(), rows, y.data());
    if (!layer.after_mlp.weight.empty()) norm(layer.after_mlp, y.data(), rows, y.data());
    if (c.parallel_residual) add(x.data(), attention.data(), n, c.residual_scale);
    add(x.data(), y.data(), n, c.residual_scale);
  }
  size_t wanted = batch.wanted.size();
  Floats picked(wanted * c.hidden);
  for (size_t i = 0; i < wanted; ++i)
    std::memcpy(&picked[i * c.hidden], &x[batch.wanted[i] * c.hidden], c.hidden * 4);
  norm(model_.last, picked.data(), wanted, picked.data());
  out.logits.resize(wanted * c.vocab);
  if (wanted) product(*model_.head, model_.head_bias, picked.data(), wanted, out.logits.data());
  for (float& v : out.logits) {
    v *= c.logit_scale;
    if (c.logit_softcap > 0) v = c.logit_softcap * std::tanh(v / c.logit_softcap);
  }
  return out;
}

}  // namespace slip
