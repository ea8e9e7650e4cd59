#include "model.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

namespace nb = nanobind;

namespace slip {

using Array = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

namespace {

// nanobind's cast of a wrong type says neither what is wrong nor that it is a TypeError.
template <class T>
T as(nb::handle value, const std::string& what) {
  T result;
  if (!nb::try_cast(value, result)) throw nb::type_error((what + " has the wrong type").c_str());
  return result;
}
nb::tuple as_pair(nb::handle value, const std::string& what) {
  auto pair = as<nb::tuple>(value, what);
  require(nb::len(pair) == 2, (what + " needs pairs").c_str());
  return pair;
}

Format format_of(const std::string& name) {
  const char* names[] = {"float32", "bfloat16", "int8", "int4"};
  for (int i = 0; i < 4; ++i)
    if (name == names[i]) return (Format)i;
  throw std::invalid_argument("unknown format " + name);
}

Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "gelu") return Activation::gelu;
  throw std::invalid_argument("unknown activation " + name);
}

Stored stored_of(const std::string& name) {
  const char* names[] = {"float32", "bfloat16", "Q4_0", "Q4_1", "Q8_0"};
  for (int i = 0; i < 5; ++i)
    if (name == names[i]) return (Stored)i;
  throw std::invalid_argument("unknown kind of weights " + name);
}

// Reads named arrays of a dictionary; what is asked for must have the size asked for.
// A matrix is (format, [(how it is stored, rows), ...]), the parts one below the other.
struct Source {
  nb::dict from;
  Pool& pool;

  Floats floats(const char* name, std::initializer_list<size_t> sizes) const {
    if (!from.contains(name)) return {};
    auto a = as<Array>(from[name], name);
    bool fits = a.ndim() == 1 && std::count(sizes.begin(), sizes.end(), a.shape(0));
    require(fits, (std::string(name) + " has the wrong size").c_str());
    return Floats(a.data(), a.data() + a.size());
  }
  std::unique_ptr<Matrix> matrix(const char* name, size_t N, size_t K) const {
    require(from.contains(name), (std::string(name) + " is missing").c_str());
    auto pair = as_pair(from[name], name);
    auto m = std::make_unique<Matrix>(N, K, format_of(as<std::string>(pair[0], name)));
    size_t first = 0;
    for (auto part : as<nb::list>(pair[1], name)) {
      auto both = as_pair(part, name);
      auto a = as<nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>>(both[1], name);
      Stored stored = stored_of(as<std::string>(both[0], name));
      bool fits = a.ndim() == 2 && a.shape(0) <= N - first &&
                  a.shape(1) * a.itemsize() == row_bytes(stored, K);
      require(fits, (std::string(name) + " has the wrong shape").c_str());
      pack(*m, first, a.shape(0), (const uint8_t*)a.data(), stored);
      first += a.shape(0);
    }
    require(first == N, (std::string(name) + " has too few rows").c_str());
    return m;
  }
  Norm norm(const std::string& name, size_t n) const {
    return {floats(name.c_str(), {n}), floats((name + "_bias").c_str(), {n})};
  }

 private:
  // Threads take whole panels: the first rows may lie in one that another part began.
  void pack(Matrix& m, size_t first, size_t count, const uint8_t* rows, Stored stored) const {
    size_t bytes = row_bytes(stored, m.columns()), last = first + count, panel = first / kPanel;
    m.set(first, 0, rows, stored);  // what is wrong is said here, not in a thread
    std::lock_guard<std::mutex> lock(pool.in_use);
    pool.run((last + kPanel - 1) / kPanel - panel, 1, [&](size_t begin, size_t end, int) {
      size_t from = std::max(first, (panel + begin) * kPanel);
      size_t to = std::min(last, (panel + end) * kPanel);
      m.set(from, to - from, rows + (from - first) * bytes, stored);
    });
  }
};

size_t size_of(const nb::dict& config, const char* name) {
  auto v = as<int64_t>(config[name], name);
  require(v >= 1 && v < (int64_t)1 << 31, (std::string(name) + " is out of range").c_str());
  return (size_t)v;
}

void read_config(const nb::dict& config, Model& model) {
  auto size = [&](const char* name) { return size_of(config, name); };
  auto number = [&](const char* name) { return as<float>(config[name], name); };
  auto flag = [&](const char* name) { return as<bool>(config[name], name); };
  Config& c = model.config;
  c = {size("hidden"),
       size("heads"),
       size("kv_heads"),
       size("dim"),
       size("inner"),
       size("vocab"),
       number("eps"),
       flag("layer_norm"),
       flag("gated"),
       flag("parallel_residual"),
       activation_of(as<std::string>(config["activation"], "activation")),
       number("query_scale"),
       number("attention_softcap"),
       number("logit_softcap"),
       number("embedding_scale"),
       number("residual_scale"),
       number("logit_scale")};
  require(c.heads % c.kv_heads == 0, "heads must be a multiple of kv_heads");
  for (auto table : as<nb::list>(config["rotary"], "rotary")) {
    auto pair = as_pair(table, "rotary");
    auto a = as<Array>(pair[0], "rotary");
    require(a.ndim() == 1 && 2 * a.shape(0) <= c.dim, "a rotary table is longer than a head");
    model.rotary.push_back({Floats(a.data(), a.data() + a.size()), as<float>(pair[1], "rotary")});
  }
}

}  // namespace

NativeModel::NativeModel(nb::dict config, nb::dict weights, int threads,
                         const std::string& kernels) {
  require(threads >= 1 && threads <= 1024, "threads must be from 1 to 1024");
  read_config(config, model_);
  const Config& c = model_.config;
  step_ = std::make_unique<Step>(model_, best_kernels(kernels), threads);
  Source source{weights, *step_->pool()};
  model_.embedding = source.matrix("embedding", c.vocab, c.hidden);
  model_.head = weights.contains("head") ? source.matrix("head", c.vocab, c.hidden)
                                         : model_.embedding;
  model_.head_bias = source.floats("head_bias", {c.vocab});
  model_.last = source.norm("norm", c.hidden);
  require(!model_.last.weight.empty(), "norm is missing");
}

NativeModel::NativeModel(nb::dict config, nb::dict weights, const NativeModel& target) {
  read_config(config, model_);
  const Config& c = model_.config;
  require(!c.layer_norm && !c.parallel_residual, "no EAGLE-3 head has such a layer");
  step_ = std::make_unique<Step>(model_, target.kernels(), target.step_->pool());
  Source source{weights, *step_->pool()};
  own_embedding_ = weights.contains("embedding");
  model_.embedding = own_embedding_ ? source.matrix("embedding", c.vocab, c.hidden)
                                    : target.model_.embedding;
  require(model_.embedding->rows() == c.vocab && model_.embedding->columns() == c.hidden,
          "the target's embedding has another shape");
  model_.normed_residual = as<bool>(config["normed_residual"], "normed_residual");
  model_.target_ids = as<Indices>(weights["target_ids"], "target_ids");
  require(!model_.target_ids.empty(), "target_ids is empty");
  for (int64_t id : model_.target_ids)
    require(id >= 0 && (size_t)id < c.vocab, "target_ids lead out of the vocabulary");
  model_.fuse = source.matrix("fuse", c.hidden, size_of(config, "features"));
  model_.head = source.matrix("head", model_.target_ids.size(), c.hidden);
  model_.last = source.norm("norm", c.hidden);
  require(!model_.last.weight.empty(), "norm is missing");
}

size_t NativeModel::bytes() const {
  size_t total = own_embedding_ ? model_.embedding->bytes() : 0;
  if (model_.head != model_.embedding) total += model_.head->bytes();
  if (model_.fuse) total += model_.fuse->bytes();
  for (const Layer& l : model_.layers)
    total += l.qkv->bytes() + l.out->bytes() + l.up->bytes() + l.down->bytes();
  return total;
}

void NativeModel::add_layer(nb::dict weights, size_t window, size_t rotary) {
  const Config& c = model_.config;
  Source source{weights, *step_->pool()};
  require(!is_head() || model_.layers.empty(), "an EAGLE-3 head has one layer");
  require(rotary < model_.rotary.size(), "no such rotary table");
  Layer layer;
  layer.before_attention = source.norm("before_attention", c.hidden);
  layer.after_attention = source.norm("after_attention", c.hidden);
  layer.before_mlp = source.norm("before_mlp", c.hidden);
  layer.after_mlp = source.norm("after_mlp", c.hidden);
  if (is_head()) {
    layer.hidden = source.norm("hidden_norm", c.hidden);
    require(!layer.hidden.weight.empty(), "hidden_norm is missing");
    require(!layer.before_attention.weight.empty(), "before_attention is missing");
  }
  size_t query = c.heads * c.dim, kv = c.kv_heads * c.dim, up = c.inner * (c.gated ? 2 : 1);
  layer.qkv = source.matrix("qkv", query + 2 * kv, is_head() ? 2 * c.hidden : c.hidden);
  layer.out = source.matrix("out", c.hidden, query);
  layer.up = source.matrix("up", up, c.hidden);
  layer.down = source.matrix("down", c.hidden, c.inner);
  layer.qkv_bias = source.floats("qkv_bias", {query + 2 * kv});
  layer.out_bias = source.floats("out_bias", {c.hidden});
  layer.up_bias = source.floats("up_bias", {up});
  layer.down_bias = source.floats("down_bias", {c.hidden});
  layer.query_norm = source.floats("query_norm", {c.dim, query});
  layer.key_norm = source.floats("key_norm", {c.dim, kv});
  layer.window = window;
  layer.rotary = rotary;
  model_.layers.push_back(std::move(layer));
}

void NativeCache::commit(const Output& output, const Indices& slots, const Indices& lengths,
                         const std::vector<Indices>& rows) {
  size_t layers = model_.model().layers.size();
  size_t kv = model_.model().config.kv_heads * model_.model().config.dim;
  require(slots.size() == lengths.size() && slots.size() == rows.size(),
          "slots, lengths and rows differ in length");
  bool ours = output.keys.size() == layers && layers == layers_;
  for (size_t l = 0; l < layers && ours; ++l)
    ours = output.keys[l].size() == output.parents.size() * kv;
  require(ours, "a step of another model, or one that ended early");
  for (size_t b = 0; b < slots.size(); ++b) {
    require(slots[b] >= 0 && (size_t)slots[b] < cache_.slots(), "no such slot");
    size_t end = lengths[b] + rows[b].size();
    require(lengths[b] >= 0 && end <= max_length_, "the slot is full");
    for (int64_t row : rows[b])
      require(row >= 0 && (size_t)row < output.parents.size(), "no such row");
    size_t capacity = cache_.capacity(slots[b]);
    if (end > capacity)
      cache_.reserve(slots[b], std::min(max_length_, std::max({end, 2 * capacity, kFirst})));
  }
  for (size_t l = 0; l < layers; ++l)
    for (size_t b = 0; b < slots.size(); ++b)
      for (size_t i = 0; i < rows[b].size(); ++i)
        cache_.put(l, slots[b], lengths[b] + i, output.keys[l].data() + rows[b][i] * kv,
                   output.values[l].data() + rows[b][i] * kv);
}

}  // namespace slip
