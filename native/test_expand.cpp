// Tests of a head's trees: the best children by sorting, and the same bits on every instruction set
// and with any number of threads. Python holds head and trees against their references.
#include "expand.h"

#include <cmath>

#include "sampling.h"
#include "tiny_model.h"

using namespace slip;

namespace {

void check_children() {
  Floats room, logits = random_floats(333);
  for (float& x : logits) x = std::round(x * 4) / 4;  // ties
  std::vector<size_t> order(logits.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  for (auto* kernels : variants()) {
    Floats log_probs(logits.size());
    log_softmax(*kernels, logits.data(), logits.size(), log_probs.data());
    for (size_t count : {0, 1, 7, 64, 332, 333, 1000}) {
      auto best = children(*kernels, logits.data(), logits.size(), count, room);
      expect(best.size() == std::min(count, logits.size()), "as many children as asked for");
      for (size_t i = 0; i < best.size(); ++i)
        expect(best[i].id == order[i] && best[i].log_prob == log_probs[order[i]],
               "the most probable, of equals the lower");
    }
    for (float bad : {NAN, INFINITY, -INFINITY}) {
      Floats broken = logits;
      broken[below(broken.size())] = bad;
      expect(children(*kernels, broken.data(), broken.size(), 3, room).empty(),
             "no children where a logit is not finite");
    }
  }
}

Model random_head(Format format) {
  Model m = random_model({"head", 32, 4, 2, 16, 64, 50, 1, 0, false, false}, format);
  m.fuse = random_matrix(32, 96, format);
  m.head = random_matrix(21, 32, format);
  m.layers[0].hidden = random_norm(32, false);
  m.layers[0].qkv = random_matrix(m.layers[0].qkv->rows(), 64, format);
  for (size_t i = 0; i < 21; ++i) m.target_ids.push_back((int64_t)(2 * i + 1));
  return m;
}

// Two trees of different shapes on known rows of two requests; a third wants none.
std::vector<DraftTree::Node> trees_of(const Model& model, const Floats& features,
                                      const Kernels& kernels, int threads) {
  Step step(model, kernels, threads);
  Cache cache(model, 3, false);
  Batch batch = batch_of({chain(0, {1, 2, 3}), chain(1, {4}), chain(2, {5, 6})}, {0, 0, 0}, 1);
  batch.wanted = {2, 3};
  batch.hidden.resize(6 * 32);
  step.fuse(features.data(), 6, batch.hidden.data());
  std::vector<DraftTree> trees{{{4, 3, 12, -INFINITY}, 2}, {{6, 1, 9, -20}, 3}, {{0, 2, 2, 0}, 5}};
  Output out;
  expand(step, model, batch, cache, out, trees);
  expect(out.keys[0].size() == out.parents.size() * 32, "keys of all rows");
  expect(trees[0].kept().size() == 12 && trees[2].kept().empty(), "trees of their sizes");
  std::vector<DraftTree::Node> all;
  for (const DraftTree& tree : trees)
    for (const auto& node : tree.kept()) all.push_back(node);
  return all;
}

void check_bits(Format format) {
  Model model = random_head(format);
  auto features = random_floats(6 * 96);
  auto want = trees_of(model, features, *portable_kernels(), 1);
  for (auto* kernels : variants())
    for (int threads : {1, 3}) {
      auto got = trees_of(model, features, *kernels, threads);
      bool same = got.size() == want.size();
      for (size_t i = 0; same && i < got.size(); ++i)
        same = got[i].token == want[i].token && got[i].parent == want[i].parent &&
               got[i].score == want[i].score;
      expect(same, std::string(kernels->name) + ": the same trees, " + name_of(format));
    }
}

}  // namespace

int main() {
  check_children();
  for (Format format : {Format::f32, Format::bf16, Format::int8, Format::int4}) check_bits(format);
  return finish("expand");
}
