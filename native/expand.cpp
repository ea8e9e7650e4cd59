#include "expand.h"

#include <algorithm>
#include <cstring>

#include "sampling.h"

namespace slip {

namespace {

bool all_finite(const float* x, size_t n) {
  uint32_t none = 0;  // sign bit: an exponent of ones, which is infinity's and NaN's
  for (size_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    none |= (bits & 0x7fffffffu) + 0x00800000u;
  }
  return !(none >> 31);
}

}  // namespace

std::vector<Child> children(const Kernels& kernels, const float* logits, size_t n, size_t count,
                            Floats& room) {
  constexpr size_t kBlock = 64;  // most hold none of the best: their greatest tells
  auto better = [](const Child& a, const Child& b) { return a.logit > b.logit; };
  std::vector<Child> best;
  count = std::min(count, n);
  if (!count || !all_finite(logits, n)) return best;
  for (size_t from = 0; from < n; from += kBlock) {
    size_t end = std::min(n, from + kBlock);
    bool full = best.size() == count;
    if (full && kernels.greatest(logits + from, end - from) <= best.back().logit) continue;
    for (size_t i = from; i < end; ++i) {
      Child child{i, logits[i], 0};
      if (best.size() == count && !better(child, best.back())) continue;
      if (best.size() == count) best.pop_back();
      best.insert(std::upper_bound(best.begin(), best.end(), child, better), child);
    }
  }
  room.resize(n);
  log_softmax(kernels, logits, n, room.data());
  for (Child& child : best) child.log_prob = room[child.id];
  return best;
}

void DraftTree::grow(const std::vector<Child>* level, const std::vector<int64_t>& target_ids) {
  size_t first = nodes_.size();
  for (size_t i = 0; i < front_.size(); ++i)
    for (const Child& child : level[i]) {
      float score = child.log_prob + (front_[i] < 0 ? 0 : nodes_[front_[i]].score);
      if (score >= shape_.least) nodes_.push_back({target_ids[child.id], front_[i], score, 0});
    }
  front_.clear();
  if (++level_ >= shape_.depth) return;
  for (size_t node : best())  // what is not among the best now will never be, nor what is below
    if (node >= first && front_.size() < shape_.width) front_.push_back((int64_t)node);
}

// The best nodes, the best first. No score exceeds its parent's: a parent is never below its child.
std::vector<size_t> DraftTree::best() const {
  std::vector<size_t> order(nodes_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  size_t count = std::min(shape_.nodes, order.size());
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](size_t a, size_t b) {
    float x = nodes_[a].score, y = nodes_[b].score;
    return x != y ? x > y : a < b;
  });
  order.resize(count);
  return order;
}

std::vector<DraftTree::Node> DraftTree::kept() const {
  std::vector<size_t> order = best();
  std::sort(order.begin(), order.end());
  std::vector<int64_t> place(nodes_.size());
  std::vector<Node> kept;
  for (size_t at : order) {
    place[at] = (int64_t)kept.size();
    kept.push_back(nodes_[at]);
    if (kept.back().parent >= 0) kept.back().parent = place[kept.back().parent];
  }
  return kept;
}

namespace {

// The front of a tree as rows below those that ``ran``, the first of them ``first`` of the output.
void add_rows(Batch& next, DraftTree& tree, size_t newest, const Batch& ran, size_t first,
              const Output& out, size_t hidden) {
  for (int64_t at : tree.front()) {
    size_t parent = tree.row(tree.node(at).parent);
    tree.node(at).row = newest + next.tokens.size();
    next.wanted.push_back(next.tokens.size());
    next.tokens.push_back(tree.node(at).token);
    next.parents.push_back((int64_t)parent);
    next.slots.push_back(ran.slots[parent - first]);
    next.past.push_back(ran.past[parent - first]);
    const float* state = &out.features[(parent - first) * hidden];
    next.hidden.insert(next.hidden.end(), state, state + hidden);
  }
}

}  // namespace

void expand(Step& step, const Model& model, Batch batch, const Cache& cache, Output& out,
            std::vector<DraftTree>& trees) {
  std::vector<Floats> rooms(step.pool()->threads());
  batch.taps = {model.layers.size()};  // a row's hidden state is its children's input
  while (true) {
    size_t first = out.parents.size(), at = 0;
    step.run(batch, cache, out);
    if (batch.wanted.empty()) return;
    std::vector<size_t> counts;
    for (const DraftTree& tree : trees)
      counts.insert(counts.end(), tree.front().size(), tree.width());
    std::vector<std::vector<Child>> found(counts.size());
    step.pool()->run(found.size(), 1, [&](size_t begin, size_t end, int thread) {
      for (size_t i = begin; i < end; ++i)
        found[i] = children(step.kernels(), &out.logits[i * model.logits()], model.logits(),
                            counts[i], rooms[thread]);
    });
    Batch next{};
    next.depth = batch.depth;
    next.taps = batch.taps;
    for (DraftTree& tree : trees) {
      size_t rows = tree.front().size();
      tree.grow(found.data() + at, model.target_ids);
      at += rows;
      add_rows(next, tree, out.parents.size(), batch, first, out, model.config.hidden);
    }
    if (next.tokens.empty()) return;
    batch = std::move(next);
  }
}

}  // namespace slip
