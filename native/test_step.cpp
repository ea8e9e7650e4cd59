// Tests of the step: the same bits on every instruction set, with any number of threads and in any
// company; what taps, depth and a continued output mean. Python holds its logits against torch's.
#include <cmath>

#include "tiny_model.h"

using namespace slip;

namespace {

constexpr Format kFormats[] = {Format::f32, Format::bf16, Format::int8, Format::int4};
constexpr Shape kShapes[] = {
    //  hidden heads kv dim inner vocab layers window
    {"llama", 32, 4, 2, 16, 64, 50, 2, 0, false, false},
    {"neox", 64, 2, 2, 32, 96, 33, 2, 0, true, false},
    {"gemma", 64, 4, 1, 8, 32, 64, 3, 5, false, true},
};
constexpr Shape kOdd = {"odd", 20, 3, 1, 20, 28, 37, 2, 7, false, false};  // for floats alone

Tokens random_tokens(const Model& model, size_t count) {
  Tokens tokens(count);
  for (auto& token : tokens) token = (int64_t)below(model.config.vocab);
  return tokens;
}

bool same(const float* a, const float* b, size_t n) { return !std::memcmp(a, b, n * 4); }
bool same(const Floats& a, const Floats& b) {
  return a.size() == b.size() && same(a.data(), b.data(), a.size());
}

struct Case {
  const Shape& shape;
  Format format;
  bool narrow;
  std::string name() const {
    return std::string(" (") + shape.name + ", " + name_of(format) + (narrow ? ", narrow)" : ")");
  }
};

// Two prefills, a ragged batch with trees and an empty slot, commits of paths, a slot that grows.
Floats scripted(const Model& model, const Case& of, const Kernels& kernels, int threads) {
  Floats seen;
  auto see = [&](const Output& out) {
    seen.insert(seen.end(), out.logits.begin(), out.logits.end());
    seen.insert(seen.end(), out.features.begin(), out.features.end());
  };
  auto tokens = [&](size_t count) {
    Tokens some;
    for (size_t i = 0; i < count; ++i) some.push_back((int64_t)(seen.size() + 7 * i) % 33);
    return some;
  };
  Runner runner(model, kernels, threads, 3, of.narrow);
  see(runner.read(0, tokens(37)));
  see(runner.read(1, tokens(4)));
  std::vector<Tree> trees{{1, tokens(3), {-1, 0, 0}},
                          {0, tokens(6), {-1, 0, 0, 1, 2, 4}},
                          {2, tokens(4), {-1, -1, 1, 1}}};
  Output out = runner.run(batch_of(trees, runner.lengths(), runner.depth()));
  see(out);
  runner.commit(out, 0, {3, 5, 7, 8});
  runner.commit(out, 1, {0, 2});
  runner.commit(out, 2, {10, 12});
  see(runner.read(1, tokens(30)));
  trees = {chain(2, tokens(1)), chain(0, tokens(1)), chain(1, tokens(1))};
  see(runner.run(batch_of(trees, runner.lengths(), runner.depth())));
  return seen;
}

void check_bits(const Model& model, const Case& of) {
  Floats want = scripted(model, of, *portable_kernels(), 1);
  bool finite = std::all_of(want.begin(), want.end(), [](float x) { return std::isfinite(x); });
  expect(finite, "numbers are finite" + of.name());
  for (auto* kernels : variants())
    for (int threads : {1, 3}) {
      std::string with = std::string(kernels->name) + ", " + std::to_string(threads) + " threads";
      expect(same(scripted(model, of, *kernels, threads), want), with + ": same bits" + of.name());
    }
}

void check_taps_and_depth(const Model& model, const Case& of) {
  size_t hidden = model.config.hidden, layers = model.layers.size(), taps = layers + 1;
  Runner runner(model, *variants().back(), 1, 1, of.narrow);
  runner.read(0, random_tokens(model, 19));
  Batch batch = batch_of({chain(0, random_tokens(model, 5))}, runner.lengths(), layers);
  Output all = runner.run(batch);
  Floats row(hidden);
  for (size_t r = 0; r < 5; ++r) {
    model.embedding->row(batch.tokens[r], row.data());
    for (float& x : row) x *= model.config.embedding_scale;
    bool embedded = same(&all.features[r * taps * hidden], row.data(), hidden);
    expect(embedded, "the first tap is the embedding" + of.name());
  }
  batch.depth = 1;
  batch.taps = {1, 0};
  batch.wanted = {3, 0, 3};
  Output shallow = runner.run(batch);
  expect(shallow.keys.size() == 1 && shallow.values.size() == 1, "a layer's KV" + of.name());
  expect(same(shallow.keys[0], all.keys[0]), "depth changes no bit of the KV" + of.name());
  for (size_t r = 0; r < 5; ++r)
    for (size_t t = 0; t < 2; ++t)
      expect(same(&shallow.features[(r * 2 + t) * hidden],
                  &all.features[(r * taps + batch.taps[t]) * hidden], hidden),
             "taps are in the order asked for" + of.name());
  size_t vocab = model.config.vocab;
  const float* logits = shallow.logits.data();
  expect(shallow.logits.size() == 3 * vocab && same(logits, logits + 2 * vocab, vocab) &&
             !same(logits, logits + vocab, vocab),
         "logits are of the rows asked for" + of.name());
  batch.wanted = {};
  expect(runner.run(batch).logits.empty(), "no logits where none are asked for" + of.name());
}

// Two runs into one output, as a drafter's, against the same tree in one.
void check_continuing(const Model& model, const Case& of) {
  size_t layers = model.layers.size();
  Runner runner(model, *variants().back(), 1, 2, of.narrow);
  runner.read(0, random_tokens(model, 18));
  runner.read(1, random_tokens(model, 3));
  std::vector<Tree> trees{{0, random_tokens(model, 5), {-1, -1, 0, 1, 3}},
                          {1, random_tokens(model, 3), {-1, 0, 0}}};
  Output want = runner.run(batch_of(trees, runner.lengths(), layers));
  std::vector<Tree> begun{{0, {trees[0].tokens[0], trees[0].tokens[1]}, {-1, -1}},
                          {1, {trees[1].tokens[0]}, {-1}}};
  Output out = runner.run(batch_of(begun, runner.lengths(), layers));
  Batch next{};
  next.tokens = {trees[0].tokens[2], trees[0].tokens[3], trees[0].tokens[4], trees[1].tokens[1],
                 trees[1].tokens[2]};
  next.parents = {0, 1, 4, 2, 2};
  next.slots = {0, 0, 0, 1, 1};
  next.past = {18, 18, 18, 3, 3};
  next.wanted = {0, 1, 2, 3, 4};
  next.depth = layers;
  runner.run(next, out);
  size_t vocab = model.config.vocab, kv = model.config.kv_heads * model.config.dim;
  const size_t one[] = {0, 1, 5, 2, 3, 4, 6, 7};  // the output's rows in the single run
  for (size_t r = 0; r < 8; ++r) {
    expect(same(&out.keys[layers - 1][r * kv], &want.keys[layers - 1][one[r] * kv], kv),
           "a continued output has the same keys" + of.name());
    if (r >= 3)
      expect(same(&out.logits[(r - 3) * vocab], &want.logits[one[r] * vocab], vocab),
             "a continued output has the same logits" + of.name());
  }
}

Tree random_tree(const Model& model, size_t slot) {
  Tree tree{slot, random_tokens(model, 1 + below(below(4) ? 8 : 40)), {}};
  bool straight = below(2);  // a chain with branches, else a bush
  for (size_t i = 0; i < tree.tokens.size(); ++i)
    tree.parents.push_back(straight && below(6) ? (int64_t)i - 1 : (int64_t)below(i + 1) - 1);
  return tree;
}

// The rows of a batch from the top to ``row``.
std::vector<size_t> path_to(const Batch& batch, size_t row) {
  std::vector<size_t> path;
  for (auto r = (int64_t)row; r >= 0; r = batch.parents[r]) path.push_back(r);
  std::reverse(path.begin(), path.end());
  return path;
}

// Random batches over slots that grow; one row of each has the bits of its text read alone.
void fuzz(const Model& model, const Case& of, int batches) {
  const size_t slots = 3;
  auto kernels = variants();
  Runner runner(model, *kernels[below(kernels.size())], 1 + (int)below(3), slots, of.narrow);
  std::vector<Tokens> texts(slots);
  for (int i = 0; i < batches; ++i) {
    std::vector<Tree> trees;
    for (size_t slot = 0; slot < slots; ++slot)
      if (below(3)) trees.push_back(random_tree(model, slot));
    if (trees.empty()) continue;
    std::shuffle(trees.begin(), trees.end(), rng);
    Batch batch = batch_of(trees, runner.lengths(), runner.depth());
    Output out = runner.run(batch);
    size_t row = below(batch.tokens.size()), slot = batch.slots[row], vocab = model.config.vocab;
    auto path = path_to(batch, row);
    for (size_t r : path) texts[slot].push_back(batch.tokens[r]);
    runner.commit(out, slot, path);
    Runner alone(model, *portable_kernels(), 1, 1, of.narrow);
    Output want = alone.read(0, texts[slot]);
    expect(same(&out.logits[row * vocab], &want.logits[want.logits.size() - vocab], vocab),
           "a row has the bits of its text alone" + of.name());
  }
}

void check(const Shape& shape, Format format, bool narrow) {
  Model model = random_model(shape, format);
  Case of{shape, format, narrow};
  check_bits(model, of);
  check_taps_and_depth(model, of);
  check_continuing(model, of);
  fuzz(model, of, 12);
}

float widened(uint16_t bf16) {
  uint32_t bits = (uint32_t)bf16 << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
float through_bf16(float x) { return widened(float_to_bf16(x)); }
float number(const void* stored, size_t at, bool narrow) {
  return narrow ? widened(((const uint16_t*)stored)[at]) : ((const float*)stored)[at];
}

void check_cache() {
  Model model = random_model(kShapes[0], Format::f32);
  size_t kv = model.config.kv_heads * model.config.dim;
  for (bool narrow : {false, true}) {
    Cache cache(model, 2, narrow);
    expect(cache.bytes() == 0 && cache.slots() == 2, "an empty cache takes no room");
    auto rows = random_floats(40 * kv);
    for (size_t i = 0; i < 40; ++i) {
      cache.reserve(1, i + 1);
      for (size_t l = 0; l < 2; ++l) cache.put(l, 1, i, &rows[i * kv], &rows[i * kv]);
    }
    cache.reserve(1, 3);  // never shrinks
    expect(cache.capacity(1) == 48 && cache.capacity(0) == 0, "room comes in whole panels");
    expect(cache.bytes() == 48 * kv * 2 * 2 * (narrow ? 2u : 4u), "the cache counts its bytes");
    for (size_t i = 0; i < 40; ++i)
      for (size_t at = 0; at < kv; ++at) {
        size_t h = at / 16, d = at % 16, key = (i / 16 * 16 + d) * 16 + i % 16;
        float want = narrow ? through_bf16(rows[i * kv + at]) : rows[i * kv + at];
        expect(number(cache.keys(1, 1, h), key, narrow) == want &&
                   number(cache.values(1, 1, h), i * 16 + d, narrow) == want,
               "keys and values survive growth");
      }
  }
}

}  // namespace

int main() {
  check_cache();
  for (bool narrow : {false, true}) {
    for (Format format : kFormats)
      for (const Shape& shape : kShapes) check(shape, format, narrow);
    check(kOdd, Format::f32, narrow);
    check(kOdd, Format::bf16, narrow);
  }
  return finish("step");
}
