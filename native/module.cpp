// The Python module: everything is checked here, so that no input can crash the process.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "step.h"

namespace nb = nanobind;
using namespace slip;
using Array = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Indices = std::vector<int64_t>;

namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

const Kernels& best_kernels(const std::string& name) {
  std::vector<const Kernels*> all;
#if defined(__x86_64__)
  all = {avx512_kernels(), avx2_kernels()};
#elif defined(__aarch64__)
  all = {neon_kernels()};
#endif
  all.push_back(portable_kernels());
  for (auto* k : all)
    if (k && (name.empty() || name == k->name)) return *k;
  throw std::invalid_argument("no kernels of the name " + name + " run on this processor");
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

// Reads named arrays of a dictionary; what is asked for must have the size asked for.
struct Source {
  nb::dict from;
  Format format;

  Floats floats(const char* name, std::initializer_list<size_t> sizes) const {
    if (!from.contains(name)) return {};
    auto a = nb::cast<Array>(from[name]);
    bool fits = a.ndim() == 1 && std::count(sizes.begin(), sizes.end(), a.shape(0));
    require(fits, (std::string(name) + " has the wrong size").c_str());
    return Floats(a.data(), a.data() + a.size());
  }
  std::unique_ptr<Matrix> matrix(const char* name, size_t N, size_t K) const {
    require(from.contains(name), (std::string(name) + " is missing").c_str());
    auto a = nb::cast<Array>(from[name]);
    bool fits = a.ndim() == 2 && a.shape(0) == N && a.shape(1) == K;
    require(fits, (std::string(name) + " has the wrong shape").c_str());
    return std::make_unique<Matrix>(a.data(), N, K, format);
  }
  Norm norm(const std::string& name, size_t n) const {
    return {floats(name.c_str(), {n}), floats((name + "_bias").c_str(), {n})};
  }
};

class NativeModel {
 public:
  NativeModel(nb::dict config, nb::dict weights, const std::string& format, int threads,
              const std::string& kernels)
      : format_(format_of(format)) {
    require(threads >= 1 && threads <= 1024, "threads must be from 1 to 1024");
    auto size = [&](const char* name) {
      auto v = nb::cast<int64_t>(config[name]);
      require(v >= 1 && v < (int64_t)1 << 31, (std::string(name) + " is out of range").c_str());
      return (size_t)v;
    };
    auto number = [&](const char* name) { return nb::cast<float>(config[name]); };
    auto flag = [&](const char* name) { return nb::cast<bool>(config[name]); };
    Config& c = model_.config;
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
         activation_of(nb::cast<std::string>(config["activation"])),
         number("query_scale"),
         number("attention_softcap"),
         number("logit_softcap"),
         number("embedding_scale"),
         number("residual_scale"),
         number("logit_scale")};
    require(c.heads % c.kv_heads == 0, "heads must be a multiple of kv_heads");
    for (auto table : nb::cast<nb::list>(config["rotary"])) {
      auto pair = nb::cast<nb::tuple>(table);
      auto a = nb::cast<Array>(pair[0]);
      require(a.ndim() == 1 && 2 * a.shape(0) <= c.dim, "a rotary table is longer than a head");
      model_.rotary.push_back({Floats(a.data(), a.data() + a.size()), nb::cast<float>(pair[1])});
    }
    Source source{weights, format_};
    auto embedding = nb::cast<Array>(weights["embedding"]);
    require(embedding.ndim() == 2 && embedding.shape(0) == c.vocab &&
                embedding.shape(1) == c.hidden,
            "embedding has the wrong shape");
    model_.embedding.assign(embedding.data(), embedding.data() + embedding.size());
    model_.head = source.matrix("head", c.vocab, c.hidden);
    model_.head_bias = source.floats("head_bias", {c.vocab});
    model_.last = source.norm("norm", c.hidden);
    require(!model_.last.weight.empty(), "norm is missing");
    step_ = std::make_unique<Step>(model_, best_kernels(kernels), threads);
    name_ = best_kernels(kernels).name;
  }

  void add_layer(nb::dict weights, size_t window, size_t rotary) {
    const Config& c = model_.config;
    Source source{weights, format_};
    require(rotary < model_.rotary.size(), "no such rotary table");
    Layer layer;
    layer.before_attention = source.norm("before_attention", c.hidden);
    layer.after_attention = source.norm("after_attention", c.hidden);
    layer.before_mlp = source.norm("before_mlp", c.hidden);
    layer.after_mlp = source.norm("after_mlp", c.hidden);
    size_t query = c.heads * c.dim, kv = c.kv_heads * c.dim, up = c.inner * (c.gated ? 2 : 1);
    layer.qkv = source.matrix("qkv", query + 2 * kv, c.hidden);
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

  const Model& model() const { return model_; }
  const std::string& kernels() const { return name_; }
  size_t bytes() const {
    size_t total = model_.embedding.size() * 4 + model_.head->bytes();
    for (const Layer& l : model_.layers)
      total += l.qkv->bytes() + l.out->bytes() + l.up->bytes() + l.down->bytes();
    return total;
  }
  Output run(const Batch& batch, Cache& cache) { return step_->run(batch, cache); }

 private:
  Model model_;
  Format format_;
  std::unique_ptr<Step> step_;
  std::string name_;
};

class NativeCache {
 public:
  NativeCache(NativeModel& model, size_t slots, size_t capacity)
      : model_(model), cache_(model.model(), slots, capacity) {
    require(slots >= 1 && capacity >= 1, "a cache needs a slot and room");
  }
  Cache& get() { return cache_; }
  size_t capacity() const { return cache_.capacity(); }

  // Append rows of a step to a slot at ``position``.
  void commit(const Output& output, size_t slot, size_t position, const Indices& rows) {
    require(slot < cache_.slots(), "no such slot");
    require(position + rows.size() <= cache_.capacity(), "the slot is full");
    size_t layers = model_.model().layers.size();
    size_t kv = model_.model().config.kv_heads * model_.model().config.dim;
    require(output.keys.size() == layers, "a step of another model");
    for (int64_t row : rows)
      require(row >= 0 && (size_t)row < output.keys[0].size() / kv, "no such row");
    for (size_t l = 0; l < layers; ++l)
      for (size_t i = 0; i < rows.size(); ++i)
        cache_.put(l, slot, position + i, output.keys[l].data() + rows[i] * kv,
                   output.values[l].data() + rows[i] * kv);
  }

 private:
  NativeModel& model_;
  Cache cache_;
};

// tokens, parents, slots, past: of all rows; parents are row indices of the whole batch, or -1.
Output run_step(NativeModel& model, NativeCache& cache, const Indices& tokens,
                const Indices& parents, const Indices& slots, const Indices& past,
                const Indices& wanted) {
  size_t rows = tokens.size();
  require(rows >= 1, "a step needs a row");
  require(parents.size() == rows && slots.size() == rows && past.size() == rows,
          "tokens, parents, slots and past differ in length");
  Batch batch{tokens, parents, {}, {}, {}};
  for (size_t r = 0; r < rows; ++r) {
    require(tokens[r] >= 0 && (size_t)tokens[r] < model.model().config.vocab, "no such token");
    require(parents[r] >= -1 && parents[r] < (int64_t)r, "a parent comes before its child");
    require(slots[r] >= 0 && (size_t)slots[r] < cache.get().slots(), "no such slot");
    require(past[r] >= 0 && (size_t)past[r] <= cache.capacity(), "more past than the slot holds");
    if (parents[r] >= 0)
      require(slots[r] == slots[parents[r]] && past[r] == past[parents[r]],
              "a child is of its parent's request");
    batch.slots.push_back(slots[r]);
    batch.past.push_back(past[r]);
  }
  for (int64_t row : wanted) {
    require(row >= 0 && (size_t)row < rows, "no such row");
    batch.wanted.push_back(row);
  }
  nb::gil_scoped_release free;
  return model.run(batch, cache.get());
}

}  // namespace

NB_MODULE(_native, m) {
  nb::class_<Output>(m, "Output").def_prop_ro("logits", [](Output& o) {
    return nb::ndarray<nb::numpy, float, nb::ndim<1>>(o.logits.data(), {o.logits.size()},
                                                      nb::find(o));
  });
  nb::class_<NativeModel>(m, "Model")
      .def(nb::init<nb::dict, nb::dict, const std::string&, int, const std::string&>(),
           nb::arg("config"), nb::arg("weights"), nb::arg("format"), nb::arg("threads"),
           nb::arg("kernels") = "")
      .def("add_layer", &NativeModel::add_layer)
      .def_prop_ro("kernels", &NativeModel::kernels)
      .def_prop_ro("bytes", &NativeModel::bytes);
  nb::class_<NativeCache>(m, "Cache")
      .def(nb::init<NativeModel&, size_t, size_t>(), nb::keep_alive<1, 2>())
      .def_prop_ro("capacity", &NativeCache::capacity)
      .def("commit", &NativeCache::commit);
  m.def("step", &run_step);
}
