// The Python module: everything is checked here, so that no input can crash the process.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>

#include "checks.h"
#include "step.h"

namespace nb = nanobind;
using namespace slip;
using Array = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Indices = std::vector<int64_t>;

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
    pool.run((last + kPanel - 1) / kPanel - panel, 1, [&](size_t begin, size_t end, int) {
      size_t from = std::max(first, (panel + begin) * kPanel);
      size_t to = std::min(last, (panel + end) * kPanel);
      m.set(from, to - from, rows + (from - first) * bytes, stored);
    });
  }
};

class NativeModel {
 public:
  NativeModel(nb::dict config, nb::dict weights, int threads, const std::string& kernels) {
    require(threads >= 1 && threads <= 1024, "threads must be from 1 to 1024");
    auto size = [&](const char* name) {
      auto v = as<int64_t>(config[name], name);
      require(v >= 1 && v < (int64_t)1 << 31, (std::string(name) + " is out of range").c_str());
      return (size_t)v;
    };
    auto number = [&](const char* name) { return as<float>(config[name], name); };
    auto flag = [&](const char* name) { return as<bool>(config[name], name); };
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
      model_.rotary.push_back({Floats(a.data(), a.data() + a.size()), as<float>(pair[1], "rotary")});
    }
    step_ = std::make_unique<Step>(model_, best_kernels(kernels), threads);
    Source source{weights, step_->pool()};
    model_.embedding = source.matrix("embedding", c.vocab, c.hidden);
    model_.head = weights.contains("head") ? source.matrix("head", c.vocab, c.hidden)
                                           : model_.embedding;
    model_.head_bias = source.floats("head_bias", {c.vocab});
    model_.last = source.norm("norm", c.hidden);
    require(!model_.last.weight.empty(), "norm is missing");
  }

  void add_layer(nb::dict weights, size_t window, size_t rotary) {
    const Config& c = model_.config;
    Source source{weights, step_->pool()};
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
  std::string kernels() const { return step_->kernels().name; }
  size_t bytes() const {
    size_t total = model_.embedding->bytes();
    if (model_.head != model_.embedding) total += model_.head->bytes();
    for (const Layer& l : model_.layers)
      total += l.qkv->bytes() + l.out->bytes() + l.up->bytes() + l.down->bytes();
    return total;
  }
  void run(const Batch& batch, const Cache& cache, Output& out) {
    std::lock_guard<std::mutex> lock(mutex_);
    step_->run(batch, cache, out);
  }

 private:
  Model model_;
  std::unique_ptr<Step> step_;
  std::mutex mutex_;  // a step's room is the model's: one at a time
};

class NativeCache {
 public:
  NativeCache(NativeModel& model, size_t slots, size_t max_length, bool narrow)
      : model_(model), max_length_(max_length), layers_(model.model().layers.size()),
        cache_(model.model(), slots, narrow) {
    require(slots >= 1 && max_length >= 1, "a cache needs a slot and room");
    require(max_length < (size_t)1 << 31, "max_length is out of range");
  }
  const Cache& get() const { return cache_; }
  size_t bytes() const { return cache_.bytes(); }
  // A layer that came later has no storage here.
  bool fits(const NativeModel& model) const {
    return &model == &model_ && model.model().layers.size() == layers_;
  }

  // Append rows of a step to slots that hold ``lengths`` tokens; a request each. Room comes first:
  // an error leaves the cache as it was, as far as can be seen.
  void commit(const Output& output, const Indices& slots, const Indices& lengths,
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

 private:
  static constexpr size_t kFirst = 256;  // tokens of room at first
  NativeModel& model_;
  size_t max_length_, layers_;
  Cache cache_;
};

// tokens, parents, slots, past: of the new rows; parents are rows of the output, or -1. wanted:
// which of the new rows' logits are asked for. taps: layers whose input is. depth: layers to run.
void run_step(NativeModel& model, NativeCache& cache, Output& out, const Indices& tokens,
              const Indices& parents, const Indices& slots, const Indices& past,
              const Indices& wanted, const Indices& taps, int64_t depth) {
  size_t rows = tokens.size(), first = out.parents.size(), layers = model.model().layers.size();
  require(cache.fits(model), "the cache is another model's");
  require(rows >= 1, "a step needs a row");
  require(parents.size() == rows && slots.size() == rows && past.size() == rows,
          "tokens, parents, slots and past differ in length");
  require(depth >= 1 && (size_t)depth <= layers, "depth is from 1 to the number of layers");
  require(!first || out.keys.size() == (size_t)depth, "the output is another step's");
  Batch batch{tokens, parents, {}, {}, {}, {}, (size_t)depth};
  for (size_t r = 0; r < rows; ++r) {
    require(tokens[r] >= 0 && (size_t)tokens[r] < model.model().config.vocab, "no such token");
    require(parents[r] >= -1 && parents[r] < (int64_t)(first + r), "a parent comes before");
    require(slots[r] >= 0 && (size_t)slots[r] < cache.get().slots(), "no such slot");
    require(past[r] >= 0 && (size_t)past[r] <= cache.get().capacity(slots[r]),
            "more past than the slot holds");
    if (parents[r] >= 0 && parents[r] < (int64_t)first) {  // its ancestors' positions start at past
      int64_t root = parents[r];
      while (out.parents[root] >= 0) root = out.parents[root];
      require(out.positions[root] == (size_t)past[r], "a child is of its parent's request");
    } else if (parents[r] >= 0) {
      size_t parent = parents[r] - first;
      require(slots[r] == slots[parent] && past[r] == past[parent],
              "a child is of its parent's request");
    }
    batch.slots.push_back(slots[r]);
    batch.past.push_back(past[r]);
  }
  for (int64_t row : wanted) {
    require(row >= 0 && (size_t)row < rows, "no such row");
    batch.wanted.push_back(row);
  }
  for (int64_t tap : taps) {
    require(tap >= 0 && tap <= depth, "no such layer");
    batch.taps.push_back(tap);
  }
  nb::gil_scoped_release free;
  model.run(batch, cache.get(), out);
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> rows_of(Floats& floats, size_t width) {
  require(width >= 1 && floats.size() % width == 0, "rows have another width");
  auto* own = new Floats(std::move(floats));  // the next step must not change or free them
  floats.clear();
  nb::capsule owner(own, [](void* p) noexcept { delete (Floats*)p; });
  return nb::ndarray<nb::numpy, float, nb::ndim<2>>(own->data(), {own->size() / width, width},
                                                    owner);
}

}  // namespace

void bind_rows(nb::module_& m);  // rows.cpp

NB_MODULE(_native, m) {
  nb::class_<Output>(m, "Output")
      .def(nb::init<>())
      .def("logits", [](Output& o, size_t width) { return rows_of(o.logits, width); })
      .def("features", [](Output& o, size_t width) { return rows_of(o.features, width); });
  nb::class_<NativeModel>(m, "Model")
      .def(nb::init<nb::dict, nb::dict, int, const std::string&>(), nb::arg("config"),
           nb::arg("weights"), nb::arg("threads"), nb::arg("kernels") = "")
      .def("add_layer", &NativeModel::add_layer)
      .def_prop_ro("kernels", &NativeModel::kernels)
      .def_prop_ro("bytes", &NativeModel::bytes);
  nb::class_<NativeCache>(m, "Cache")
      .def(nb::init<NativeModel&, size_t, size_t, bool>(), nb::keep_alive<1, 2>())
      .def_prop_ro("bytes", &NativeCache::bytes)
      .def("commit", &NativeCache::commit);
  m.def("step", &run_step, nb::arg("model"), nb::arg("cache"), nb::arg("output"),
        nb::arg("tokens"), nb::arg("parents"), nb::arg("slots"), nb::arg("past"),
        nb::arg("wanted"), nb::arg("taps"), nb::arg("depth"));
  bind_rows(m);
}
