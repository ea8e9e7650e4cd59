#include "step.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace slip {

namespace {

constexpr size_t kFewRows = 4;  // fewer are not worth waking a thread for their norms and the like

float through_bf16(float x) {
  uint32_t u = (uint32_t)float_to_bf16(x) << 16;
  std::memcpy(&x, &u, 4);
  return x;
}

template <class T>
T to(float x);
template <>
float to<float>(float x) {
  return x;
}
template <>
uint16_t to<uint16_t>(float x) {
  return float_to_bf16(x);
}

// One row into the layout of keys and of values.
template <class T>
void put_key(void* block, size_t place, const float* from, size_t dim) {
  auto* at = (T*)block + place;
  for (size_t d = 0; d < dim; ++d) at[d * kPanel] = to<T>(from[d]);
}
template <class T>
void put_value(void* values, const float* from, size_t dim) {
  for (size_t d = 0; d < dim; ++d) ((T*)values)[d] = to<T>(from[d]);
}

}  // namespace

Cache::Cache(const Model& model, size_t slots, bool narrow)
    : layers_(model.layers.size()),
      heads_(model.config.kv_heads),
      dim_(model.config.dim),
      size_(narrow ? 2 : 4),
      narrow_(narrow),
      slots_(slots) {}

size_t Cache::bytes() const {
  size_t total = 0;
  for (const Slot& s : slots_) total += 2 * layers_ * heads_ * s.capacity * dim_ * size_;
  return total;
}

// All storage of the larger slot is there before the old one goes: an error changes nothing.
void Cache::reserve(size_t slot, size_t capacity) {
  Slot& old = slots_[slot];
  if (capacity <= old.capacity) return;
  Slot grown;
  grown.capacity = (capacity + kPanel - 1) / kPanel * kPanel;
  size_t was = old.capacity * dim_ * size_, now = grown.capacity * dim_ * size_;
  for (size_t l = 0; l < layers_; ++l)
    for (auto* stores : {&grown.keys, &grown.values}) {
      Bytes& to = stores->emplace_back(heads_ * now);
      if (!was) continue;
      const Bytes& from = stores == &grown.keys ? old.keys[l] : old.values[l];
      for (size_t h = 0; h < heads_; ++h) std::memcpy(&to[h * now], &from[h * was], was);
    }
  old = std::move(grown);
}

const void* Cache::keys(size_t layer, size_t slot, size_t head) const {
  const Slot& s = slots_[slot];
  return s.capacity ? &s.keys[layer][head * s.capacity * dim_ * size_] : nullptr;
}

const void* Cache::values(size_t layer, size_t slot, size_t head) const {
  const Slot& s = slots_[slot];
  return s.capacity ? &s.values[layer][head * s.capacity * dim_ * size_] : nullptr;
}

void Cache::put(size_t layer, size_t slot, size_t position, const float* k, const float* v) {
  size_t block = position / kPanel * kPanel * dim_ * size_, row = position * dim_ * size_;
  for (size_t h = 0; h < heads_; ++h) {
    auto* key = (uint8_t*)keys(layer, slot, h) + block;
    auto* value = (uint8_t*)values(layer, slot, h) + row;
    if (narrow_) {
      put_key<uint16_t>(key, position % kPanel, k + h * dim_, dim_);
      put_value<uint16_t>(value, v + h * dim_, dim_);
    } else {
      put_key<float>(key, position % kPanel, k + h * dim_, dim_);
      put_value<float>(value, v + h * dim_, dim_);
    }
  }
}

Step::Step(const Model& model, const Kernels& kernels, std::shared_ptr<Pool> pool)
    : model_(model),
      kernels_(kernels),
      shared_(std::move(pool)),
      pool_(*shared_),
      scores_(pool_.threads()) {}

// Y = X·Wᵀ + bias for any number of rows. Threads take panels; a panel is used for all blocks of
// rows while it is in the cache. Blocks are about the same size: a last one of a row or two would
// wait for its own sums.
void Step::product(const Matrix& w, const Floats& bias, const float* x, size_t rows, float* y) {
  size_t blocks = (rows + kMaxRows - 1) / kMaxRows, N = w.rows(), ld = w.panels() * kPanel;
  if (arranged_.size() < blocks) arranged_.resize(blocks);
  std::vector<Rows> parts(blocks);
  auto start = [&](size_t b) { return rows * b / blocks; };
  pool_.run(blocks, 1, [&](size_t begin, size_t end, int) {
    for (size_t b = begin; b < end; ++b) {
      int count = (int)(start(b + 1) - start(b));
      parts[b] =
          arranged_[b].arrange(kernels_, x + start(b) * w.columns(), count, w.columns(), w.format());
    }
  });
  bool whole = ld == N;
  if (!whole) padded_.resize(rows * ld);
  float* to = whole ? y : padded_.data();
  Product kernel = kernels_.product[(int)w.format()];
  constexpr size_t kTogether = 8;  // panels
  pool_.run(w.panels(), 1, [&](size_t begin, size_t end, int) {
    for (size_t p = begin; p < end; p += kTogether)
      for (size_t b = 0; b < blocks; ++b)
        kernel(w.view(), parts[b], w.columns(), p, std::min(p + kTogether, end),
               to + start(b) * ld, ld);
  });
  for (size_t m = 0; m < rows && (!whole || !bias.empty()); ++m) {
    if (!whole) std::memcpy(y + m * N, to + m * ld, N * 4);
    for (size_t n = 0; n < bias.size(); ++n) y[m * N + n] += bias[n];
  }
}

// The same with activations of twice the bits: each row goes in as two, what 8 bits hold and what
// they leave over, and the two results are added. For queries, keys and values, which lose most.
void Step::fine_product(const Matrix& w, const Floats& bias, const float* x, size_t rows,
                        float* y) {
  if (w.format() == Format::f32 || w.format() == Format::bf16)
    return product(w, bias, x, rows, y);
  size_t K = w.columns(), N = w.rows();
  halves_.resize(2 * rows * K);
  sums_.resize(2 * rows * N);
  pool_.run(rows, kFewRows, [&](size_t begin, size_t end, int) {
    for (size_t i = begin * K; i < end * K; i += kGroup) {
      float* coarse = &halves_[(i / K * 2) * K + i % K];
      kernels_.split(x + i, coarse, coarse + K);
    }
  });
  product(w, {}, halves_.data(), 2 * rows, sums_.data());
  pool_.run(rows, kFewRows, [&](size_t begin, size_t end, int) {
    for (size_t r = begin; r < end; ++r) {
      const float *coarse = &sums_[2 * r * N], *rest = coarse + N;
      for (size_t n = 0; n < N; ++n) y[r * N + n] = coarse[n] + rest[n];
      for (size_t n = 0; n < bias.size(); ++n) y[r * N + n] += bias[n];
    }
  });
}

void Step::norm(const Norm& n, const float* x, size_t rows, float* y) {
  size_t width = n.weight.size();
  const float *weight = n.weight.data(), *bias = n.bias.empty() ? nullptr : n.bias.data();
  pool_.run(rows, kFewRows, [&](size_t begin, size_t end, int) {
    for (size_t r = begin; r < end; ++r) {
      const float* from = x + r * width;
      if (model_.config.layer_norm)
        kernels_.layer_norm(from, weight, bias, width, model_.config.eps, y + r * width);
      else
        kernels_.rms_norm(from, weight, width, model_.config.eps, y + r * width);
    }
  });
}

// What an EAGLE-3 head's layer starts from. x: the tokens' embeddings, becomes the residual; both:
// [rows][2 * hidden], embedding and hidden state side by side, each after its own norm.
void Step::join(const Layer& layer, const Batch& batch, float* x, float* both) {
  size_t h = model_.config.hidden;
  float eps = model_.config.eps;
  pool_.run(batch.tokens.size(), kFewRows, [&](size_t begin, size_t end, int) {
    for (size_t r = begin; r < end; ++r) {
      float *residual = x + r * h, *to_ = both + r * 2 * h;
      const float* hidden = &batch.hidden[r * h];
      kernels_.rms_norm(residual, layer.before_attention.weight.data(), h, eps, to_);
      kernels_.rms_norm(hidden, layer.hidden.weight.data(), h, eps, to_ + h);
      std::memcpy(residual, model_.normed_residual ? to_ + h : hidden, h * 4);
    }
  });
}

void Step::fuse(const float* features, size_t rows, float* hidden) {
  fine_product(*model_.fuse, {}, features, rows, hidden);
}

// Cosine and sine of every new row and table, once a step: [rows][2][half].
void Step::prepare_angles(const Output& out, size_t first) {
  size_t rows = out.positions.size() - first;
  angles_.resize(model_.rotary.size());
  for (size_t t = 0; t < angles_.size(); ++t) {
    const Rotary& table = model_.rotary[t];
    size_t half = table.inverse_frequencies.size();
    angles_[t].resize(rows * 2 * half);
    pool_.run(rows, kFewRows, [&](size_t begin, size_t end, int) {
      for (size_t r = begin; r < end; ++r)
        for (size_t i = 0; i < half; ++i) {
          float angle = (float)out.positions[first + r] * table.inverse_frequencies[i];
          angles_[t][2 * r * half + i] = std::cos(angle) * table.scale;
          angles_[t][(2 * r + 1) * half + i] = std::sin(angle) * table.scale;
        }
    });
  }
}

// Rows that follow each other from the newest committed token on share a tail (known tokens, a
// drafted chain); every other row gets its own.
void Step::prepare_tails(const Batch& batch, const Output& out, size_t first, const Cache& cache) {
  const Config& c = model_.config;
  size_t size = cache.narrow() ? 2 : 4, used = 0;
  auto start = [&](size_t r) -> Tail& {
    if (tails_.size() == used) tails_.emplace_back();
    Tail& tail = tails_[used++];
    tail.slot = batch.slots[r];
    tail.past = batch.past[r];
    tail.rows.clear();
    return tail;
  };
  tail_of_.resize(batch.tokens.size());
  run_of_.resize(batch.tokens.size());
  runs_.clear();
  bool chain = false;  // the row before is of a chain from the top
  for (size_t r = 0; r < batch.tokens.size(); ++r) {
    bool fresh = batch.parents[r] < 0 && (!r || batch.slots[r] != batch.slots[r - 1]);
    chain = fresh || (chain && batch.parents[r] == (int64_t)(first + r - 1));
    if (chain && !fresh) {
      tails_[used - 1].rows.push_back(first + r);
    } else {
      Tail& tail = start(r);
      for (int64_t row = first + r; row >= 0; row = out.parents[row]) tail.rows.push_back(row);
      std::reverse(tail.rows.begin(), tail.rows.end());
    }
    tail_of_[r] = used - 1;
    if (!r || batch.slots[r] != batch.slots[r - 1] || batch.past[r] != batch.past[r - 1])
      runs_.push_back({r, 0});
    ++runs_.back().rows;
    run_of_[r] = runs_.size() - 1;
  }
  tails_.resize(used);
  for (Tail& tail : tails_) {
    size_t count = tail.past + tail.rows.size();
    tail.blocks = (count + kPanel - 1) / kPanel - tail.past / kPanel;
    tail.keys.resize(c.kv_heads * tail.blocks * kPanel * c.dim * size);
    tail.values.resize(c.kv_heads * tail.rows.size() * c.dim * size);
  }
}

// Queries lie slot by slot, group by group, row by row. A thread takes neighbours that see about as
// many positions as another's: in a long prompt the later rows see most.
void Step::prepare_shares(const Output& out, size_t first) {
  size_t heads = model_.config.heads, share = heads / model_.config.kv_heads;
  size_t threads = pool_.threads(), total = 0, seen = 0, query = 0;
  auto sees = [&](size_t row) { return out.positions[first + row] + 1; };
  for (size_t r = 0; r < tail_of_.size(); ++r) total += sees(r) * heads;
  shares_.assign(1, 0);
  for (const Run& run : runs_)
    for (size_t i = 0; i < run.rows * heads; ++i) {
      seen += sees(run.first + i / share % run.rows);
      ++query;
      while (shares_.size() < threads && seen * threads >= shares_.size() * total)
        shares_.push_back(query);
    }
  shares_.push_back(query);
}

template <class T>
void Step::fill_tail(Tail& tail, size_t group, size_t l, const Cache& cache, const Output& out) {
  size_t dim = model_.config.dim, kv = model_.config.kv_heads * dim, filled = tail.past % kPanel;
  auto* keys = (T*)tail.keys.data() + group * tail.blocks * kPanel * dim;
  auto* values = (T*)tail.values.data() + group * tail.rows.size() * dim;
  if (filled) {  // the committed part of the first block; the lanes beside it are never looked at
    auto* from = (const T*)cache.keys(l, tail.slot, group) + tail.past / kPanel * kPanel * dim;
    std::memcpy(keys, from, kPanel * dim * sizeof(T));
  }
  for (size_t i = 0; i < tail.rows.size(); ++i) {
    size_t place = filled + i, from = tail.rows[i] * kv + group * dim;
    put_key<T>(keys + place / kPanel * kPanel * dim, place % kPanel, &out.keys[l][from], dim);
    put_value<T>(values + i * dim, &out.values[l][from], dim);
  }
}

void Step::fill_tails(size_t l, const Cache& cache, const Output& out) {
  size_t groups = model_.config.kv_heads;
  pool_.run(tails_.size() * groups, 8, [&](size_t begin, size_t end, int) {
    for (size_t i = begin; i < end; ++i)
      if (cache.narrow())
        fill_tail<uint16_t>(tails_[i / groups], i % groups, l, cache, out);
      else
        fill_tail<float>(tails_[i / groups], i % groups, l, cache, out);
  });
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
                         size_t l, size_t first, bool narrow) {
  const Config& c = model_.config;
  size_t width = (c.heads + 2 * c.kv_heads) * c.dim, kv = c.kv_heads * c.dim;
  const Floats& angles = angles_[layer.rotary];
  size_t half = model_.rotary[layer.rotary].inverse_frequencies.size();
  auto normalise = [&](float* x, size_t heads, const Floats& w) {
    if (w.empty()) return;
    for (size_t at = 0; at < heads * c.dim; at += w.size())
      kernels_.rms_norm(x + at, w.data(), w.size(), c.eps, x + at);
  };
  auto keep = [&](float* to_, const float* from) {
    for (size_t i = 0; i < kv; ++i) to_[i] = narrow ? through_bf16(from[i]) : from[i];
  };
  pool_.run(batch.tokens.size(), kFewRows, [&](size_t begin, size_t end, int) {
    for (size_t r = begin; r < end; ++r) {
      float *query = qkv + r * width, *key = query + c.heads * c.dim, *value = key + kv;
      normalise(query, c.heads, layer.query_norm);
      normalise(key, c.kv_heads, layer.key_norm);
      const float* cosine = angles.data() + 2 * r * half;
      for (size_t h = 0; h < c.heads + c.kv_heads; ++h)
        rotate(query + h * c.dim, cosine, cosine + half, half);
      for (size_t i = 0; i < c.heads * c.dim; ++i) query[i] *= c.query_scale;
      keep(out.keys[l].data() + (first + r) * kv, key);
      keep(out.values[l].data() + (first + r) * kv, value);
    }
  });
}

// Each thread hands the queries of one slot and group to the kernel together.
void Step::attend(const Layer& layer, size_t l, const float* qkv, const Cache& cache,
                  const Output& out, size_t first, float* y) {
  const Config& c = model_.config;
  size_t width = (c.heads + 2 * c.kv_heads) * c.dim, size = cache.narrow() ? 2 : 4;
  size_t share = c.heads / c.kv_heads;
  size_t room = (*std::max_element(out.positions.begin(), out.positions.end()) / kPanel + 1) * kPanel;
  pool_.run(shares_.size() - 1, 1, [&](size_t thread, size_t, int) {
    Floats& scores = scores_[thread];
    size_t begin = shares_[thread], end = shares_[thread + 1];
    if (scores.size() < room * kMaxQueries) scores.resize(2 * room * kMaxQueries);
    Query queries[kMaxQueries];
    for (size_t item = begin, n; item < end; item += n) {
      const Run& run = runs_[run_of_[item / c.heads]];
      const Tail& any = tails_[tail_of_[run.first]];
      size_t of_group = run.rows * share, start = item - run.first * c.heads;
      size_t g = start / of_group, i = start % of_group;
      n = std::min({end - item, of_group - i, kMaxQueries});
      for (size_t k = 0; k < n; ++k, ++i) {
        size_t r = run.first + i / share, h = g * share + i % share;
        size_t position = out.positions[first + r];
        const Tail& tail = tails_[tail_of_[r]];
        bool cut = layer.window && position >= layer.window;
        queries[k] = {qkv + r * width + h * c.dim,
                      &tail.keys[g * tail.blocks * kPanel * c.dim * size],
                      &tail.values[g * tail.rows.size() * c.dim * size],
                      cut ? position - layer.window + 1 : 0,
                      position + 1,
                      scores.data() + k * room,
                      y + (r * c.heads + h) * c.dim};
      }
      kernels_.attend[cache.narrow()]({queries, n, cache.keys(l, any.slot, g),
                                       cache.values(l, any.slot, g), any.past, c.dim,
                                       c.attention_softcap});
    }
  });
}

void Step::mlp(const Layer& layer, const float* x, size_t rows, float* y) {
  const Config& c = model_.config;
  size_t width = c.gated ? 2 * c.inner : c.inner;
  up_.resize(rows * width);
  inner_.resize(rows * c.inner);
  product(*layer.up, layer.up_bias, x, rows, up_.data());
  pool_.run(rows, kFewRows, [&](size_t begin, size_t end, int) {
    for (size_t r = begin; r < end; ++r) {
      const float* gate = up_.data() + r * width;
      kernels_.activate(c.activation, gate, c.gated ? gate + c.inner : nullptr, c.inner,
                        inner_.data() + r * c.inner);
    }
  });
  product(*layer.down, layer.down_bias, inner_.data(), rows, y);
}

void Step::add(float* x, const float* y, size_t n, float scale) {
  constexpr size_t kFew = 4096;  // numbers not worth waking a thread for
  pool_.run(n, kFew, [&](size_t begin, size_t end, int) {
    for (size_t i = begin; i < end; ++i) x[i] += scale * y[i];
  });
}

void Step::run(const Batch& batch, const Cache& cache, Output& out) {
  const Config& c = model_.config;
  size_t rows = batch.tokens.size(), kv = c.kv_heads * c.dim, n = rows * c.hidden;
  size_t first = out.parents.size();
  for (size_t r = 0; r < rows; ++r) {
    int64_t parent = batch.parents[r];
    out.parents.push_back(parent);
    out.positions.push_back(parent < 0 ? batch.past[r] : out.positions[parent] + 1);
  }
  prepare_angles(out, first);
  prepare_tails(batch, out, first, cache);
  prepare_shares(out, first);
  Floats x(n), normed(model_.fuse ? 2 * n : n), y(n), attention,
      qkv(rows * (c.heads + 2 * c.kv_heads) * c.dim), mixed(rows * c.heads * c.dim);
  for (size_t r = 0; r < rows; ++r) {
    model_.embedding->row(batch.tokens[r], &x[r * c.hidden]);
    for (size_t i = 0; i < c.hidden; ++i) x[r * c.hidden + i] *= c.embedding_scale;
  }
  out.features.resize(rows * batch.taps.size() * c.hidden);
  auto tap = [&](size_t layer) {
    for (size_t t = 0; t < batch.taps.size(); ++t)
      for (size_t r = 0; r < rows && batch.taps[t] == layer; ++r)
        std::memcpy(&out.features[(r * batch.taps.size() + t) * c.hidden], &x[r * c.hidden],
                    c.hidden * 4);
  };
  auto norm_or_copy = [&](const Norm& norm_, const float* from, float* to_) {
    if (norm_.weight.empty())
      std::memcpy(to_, from, n * 4);
    else
      norm(norm_, from, rows, to_);
  };
  out.keys.resize(batch.depth);
  out.values.resize(batch.depth);
  for (size_t l = 0; l < batch.depth; ++l) {
    const Layer& layer = model_.layers[l];
    tap(l);
    out.keys[l].resize((first + rows) * kv);
    out.values[l].resize((first + rows) * kv);
    if (model_.fuse)
      join(layer, batch, x.data(), normed.data());
    else
      norm_or_copy(layer.before_attention, x.data(), normed.data());
    fine_product(*layer.qkv, layer.qkv_bias, normed.data(), rows, qkv.data());
    prepare_heads(layer, qkv.data(), batch, out, l, first, cache.narrow());
    fill_tails(l, cache, out);
    attend(layer, l, qkv.data(), cache, out, first, mixed.data());
    product(*layer.out, layer.out_bias, mixed.data(), rows, y.data());
    if (!layer.after_attention.weight.empty()) norm(layer.after_attention, y.data(), rows, y.data());
    if (c.parallel_residual)
      attention = y;
    else
      add(x.data(), y.data(), n, c.residual_scale);
    norm_or_copy(layer.before_mlp, x.data(), normed.data());
    mlp(layer, normed.data(), rows, y.data());
    if (!layer.after_mlp.weight.empty()) norm(layer.after_mlp, y.data(), rows, y.data());
    if (c.parallel_residual) add(x.data(), attention.data(), n, c.residual_scale);
    add(x.data(), y.data(), n, c.residual_scale);
  }
  tap(batch.depth);
  size_t wanted = batch.wanted.size();
  Floats picked(wanted * c.hidden);
  for (size_t i = 0; i < wanted; ++i)
    std::memcpy(&picked[i * c.hidden], &x[batch.wanted[i] * c.hidden], c.hidden * 4);
  norm(model_.last, picked.data(), wanted, picked.data());
  out.logits.resize(wanted * model_.logits());
  if (wanted) product(*model_.head, model_.head_bias, picked.data(), wanted, out.logits.data());
  if (c.logit_scale != 1)
    for (float& v : out.logits) v *= c.logit_scale;
  if (c.logit_softcap > 0)
    for (float& v : out.logits) v = c.logit_softcap * std::tanh(v / c.logit_softcap);
}

}  // namespace slip
