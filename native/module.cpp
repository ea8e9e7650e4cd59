// The Python module.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "model.h"
#include "sampling.h"

namespace nb = nanobind;
using namespace slip;
using Result = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using Given = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

namespace {

// tokens, parents, slots, past: of the new rows; parents are rows of the output, or -1. wanted:
// which of the new rows' logits are asked for.
struct NewRows {
  Indices tokens, parents, slots, past, wanted;
};

// taps: layers whose input is asked for. depth: layers to run.
Batch checked(const NativeModel& model, const NativeCache& cache, const Output& out,
              const NewRows& new_rows, const Indices& taps, int64_t depth) {
  const auto& [tokens, parents, slots, past, wanted] = new_rows;
  size_t rows = tokens.size(), first = out.parents.size(), layers = model.model().layers.size();
  require(cache.fits(model), "the cache is another model's");
  require(rows >= 1, "a step needs a row");
  require(parents.size() == rows && slots.size() == rows && past.size() == rows,
          "tokens, parents, slots and past differ in length");
  require(depth >= 1 && (size_t)depth <= layers, "depth is from 1 to the number of layers");
  require(!first || out.keys.size() == (size_t)depth, "the output is another step's");
  Batch batch{tokens, parents, {}, {}, {}, {}, (size_t)depth, {}};
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
  return batch;
}

Floats copied(const Given& given, size_t rows, size_t columns) {
  require(given.shape(0) == rows && given.shape(1) == columns, "hidden or features misfit");
  return Floats(given.data(), given.data() + given.size());
}

// hidden: [rows][hidden], for EAGLE-3 heads.
void run_step(NativeModel& model, NativeCache& cache, Output& out, const Indices& tokens,
              const Indices& parents, const Indices& slots, const Indices& past,
              const Indices& wanted, const Indices& taps, int64_t depth,
              const std::optional<Given>& hidden) {
  NewRows rows{tokens, parents, slots, past, wanted};
  Batch batch = checked(model, cache, out, rows, taps, depth);
  if (hidden) batch.hidden = copied(*hidden, tokens.size(), model.model().config.hidden);
  nb::gil_scoped_release free;
  model.run(batch, cache.get(), out);
}

Result rows_of(Floats& floats, size_t width) {
  require(width >= 1 && floats.size() % width == 0, "rows have another width");
  auto* own = new Floats(std::move(floats));  // the next step must not change or free them
  floats.clear();
  nb::capsule owner(own, [](void* p) noexcept { delete (Floats*)p; });
  return Result(own->data(), {own->size() / width, width}, owner);
}

// How a request's guesses are chosen: drawn with its numbers in [0, 1), one a guess, or, without
// any, the most probable tokens. Temperature, top-k, top-p, min-p, numbers.
using Choice = std::tuple<float, int64_t, float, float, std::vector<double>>;

struct Guesses {
  size_t count;  // wanted
  Truncation cut;
  std::vector<double> numbers;
  Indices tokens;
  Floats probs;  // [tokens][width], if drawn

  void add(const Kernels& kernels, const float* logits, size_t width, Floats& room) {
    size_t n = tokens.size();
    if (numbers.empty()) return tokens.push_back(argmax(kernels, logits, width));
    probs.resize((n + 1) * width);
    probabilities(kernels, logits, width, cut, room, &probs[n * width]);
    tokens.push_back(inverse_cdf(&probs[n * width], width, numbers[n]));
  }
};

// Guess after guess, those of all requests together, as rows of one output.
void extend(NativeModel& model, const NativeCache& cache, Output& out, NewRows rows,
            std::vector<Guesses>& guesses, size_t width) {
  std::vector<Guesses*> live;
  for (Guesses& g : guesses) live.push_back(&g);
  size_t vocab = model.model().config.vocab, depth = model.model().layers.size();
  Floats room;
  while (!live.empty()) {
    size_t first = out.parents.size();
    model.run(checked(model, cache, out, rows, {}, depth), cache.get(), out);
    NewRows next;
    std::vector<Guesses*> still;
    for (size_t i = 0; i < live.size(); ++i) {
      Guesses& g = *live[i];
      g.add(model.kernels(), &out.logits[i * vocab], width, room);
      if (g.tokens.size() == g.count) continue;
      size_t row = rows.wanted[i];
      next.wanted.push_back(still.size());
      next.tokens.push_back(g.tokens.back());
      next.parents.push_back(first + row);
      next.slots.push_back(rows.slots[row]);
      next.past.push_back(rows.past[row]);
      still.push_back(&g);
    }
    rows = std::move(next);
    live = std::move(still);
  }
}

// A draft model's guesses, ``counts`` for each request, below the rows of a first step. wanted: the
// last row of each request. width: tokens that may be guessed. Returns, for each request, the
// guesses and the distributions [count, width] they were drawn from (empty if they were not).
std::vector<std::pair<Indices, Result>> draft(NativeModel& model, NativeCache& cache, Output& out,
                                              const Indices& tokens, const Indices& parents,
                                              const Indices& slots, const Indices& past,
                                              const Indices& wanted, const Indices& counts,
                                              const std::vector<Choice>& choices, size_t width) {
  size_t requests = wanted.size();
  require(counts.size() == requests && choices.size() == requests,
          "wanted, counts and choices differ in length");
  require(width >= 1 && width <= model.model().config.vocab, "width is from 1 to the vocabulary");
  std::vector<Guesses> guesses;
  for (size_t i = 0; i < requests; ++i) {
    const auto& [temperature, top_k, top_p, min_p, numbers] = choices[i];
    require(counts[i] >= 1 && (size_t)counts[i] <= cache.max_length(),
            "a draft has from one token to as many as a slot holds");
    require(numbers.empty() || numbers.size() == (size_t)counts[i], "a number for each guess");
    guesses.push_back(
        {(size_t)counts[i], truncation(temperature, top_k, top_p, min_p), numbers, {}, {}});
  }
  {
    nb::gil_scoped_release free;
    extend(model, cache, out, {tokens, parents, slots, past, wanted}, guesses, width);
  }
  std::vector<std::pair<Indices, Result>> drafts;
  for (Guesses& g : guesses) drafts.emplace_back(g.tokens, rows_of(g.probs, width));
  return drafts;
}

// An EAGLE-3 head's: rows of features of its target -> hidden states.
Result fuse(NativeModel& model, const Given& features) {
  require(model.is_head(), "the model is no EAGLE-3 head");
  size_t rows = features.shape(0), width = model.model().config.hidden;
  Floats from = copied(features, rows, model.model().fuse->columns()), hidden(rows * width);
  if (rows) {
    nb::gil_scoped_release free;
    model.fuse(from.data(), rows, hidden.data());
  }
  return rows_of(hidden, width);
}

// Depth, width, nodes, least score.
using Shape = std::tuple<int64_t, int64_t, int64_t, double>;
// Tokens, parents, scores.
using Expanded = std::tuple<Indices, Indices, std::vector<float>>;

// The trees of an EAGLE-3 head. wanted: of each the root, one of the rows. features: [rows][...],
// of the position before each row.
std::vector<Expanded> expand_rows(NativeModel& model, NativeCache& cache, Output& out,
                                  const Indices& tokens, const Indices& parents,
                                  const Indices& slots, const Indices& past, const Indices& wanted,
                                  const Given& features, const std::vector<Shape>& shapes) {
  require(model.is_head(), "the model is no EAGLE-3 head");
  require(wanted.size() == shapes.size(), "wanted and shapes differ in length");
  NewRows rows{tokens, parents, slots, past, wanted};
  size_t first = out.parents.size();
  Batch batch = checked(model, cache, out, rows, {}, (int64_t)model.model().layers.size());
  Floats from = copied(features, tokens.size(), model.model().fuse->columns());
  std::vector<DraftTree> trees;
  batch.wanted.clear();
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto& [depth, width, nodes, least] = shapes[i];
    require(depth >= 0 && (size_t)depth <= cache.max_length(),
            "a tree has from no level to as many as a slot holds");
    require(width >= 1 && nodes >= 0 && least <= 0, "width, nodes or floor is out of range");
    trees.emplace_back(TreeShape{(size_t)depth, (size_t)width, (size_t)nodes, least},
                       first + wanted[i]);
    if (!trees.back().front().empty()) batch.wanted.push_back(wanted[i]);
  }
  {
    nb::gil_scoped_release free;
    model.expand(std::move(batch), from, cache.get(), out, trees);
  }
  std::vector<Expanded> found;
  for (const DraftTree& tree : trees) {
    auto& [ids, above, scores] = found.emplace_back();
    for (const DraftTree::Node& node : tree.kept()) {
      ids.push_back(node.token);
      above.push_back(node.parent);
      scores.push_back(node.score);
    }
  }
  return found;
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
      .def(nb::init<nb::dict, nb::dict, const NativeModel&>(), nb::arg("config"),
           nb::arg("weights"), nb::arg("target"))
      .def("add_layer", &NativeModel::add_layer)
      .def_prop_ro("kernels", [](const NativeModel& m) { return std::string(m.kernels().name); })
      .def_prop_ro("bytes", &NativeModel::bytes);
  nb::class_<NativeCache>(m, "Cache")
      .def(nb::init<NativeModel&, size_t, size_t, bool>(), nb::keep_alive<1, 2>())
      .def_prop_ro("bytes", &NativeCache::bytes)
      .def("commit", &NativeCache::commit);
  m.def("step", &run_step, nb::arg("model"), nb::arg("cache"), nb::arg("output"),
        nb::arg("tokens"), nb::arg("parents"), nb::arg("slots"), nb::arg("past"),
        nb::arg("wanted"), nb::arg("taps"), nb::arg("depth"), nb::arg("hidden") = nb::none());
  m.def("draft", &draft, nb::arg("model"), nb::arg("cache"), nb::arg("output"), nb::arg("tokens"),
        nb::arg("parents"), nb::arg("slots"), nb::arg("past"), nb::arg("wanted"),
        nb::arg("counts"), nb::arg("choices"), nb::arg("width"));
  m.def("fuse", &fuse, nb::arg("model"), nb::arg("features"));
  m.def("expand", &expand_rows, nb::arg("model"), nb::arg("cache"), nb::arg("output"),
        nb::arg("tokens"), nb::arg("parents"), nb::arg("slots"), nb::arg("past"),
        nb::arg("wanted"), nb::arg("features"), nb::arg("shapes"));
  bind_rows(m);
}
