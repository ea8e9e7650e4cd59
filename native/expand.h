// A head's tree of guesses, level by level (EAGLE-2, Li et al. 2024, arXiv 2406.16858). The
// reference, and what each rule is for, is in Python: drafters/expand.py.
#pragma once
#include "step.h"

namespace slip {

// least: the score below which a path is dropped.
struct TreeShape {
  size_t depth, width, nodes;
  double least;
};

// A token of the draft vocabulary after a row.
struct Child {
  size_t id;
  float logit, log_prob;
};

// The most probable tokens, the best first, of equals the lower first; none where a logit is not a
// finite number. room: for n numbers.
std::vector<Child> children(const Kernels& kernels, const float* logits, size_t n, size_t count,
                            Floats& room);

class DraftTree {
 public:
  struct Node {
    int64_t token, parent;  // parent: an earlier node, -1 for the root
    float score;            // log-probability of the path down to it
    size_t row;             // of the output, if it was run
  };

  // root: the row of the step that the tree hangs on.
  DraftTree(const TreeShape& shape, size_t root) : shape_(shape), root_(root) {
    if (shape.depth && shape.nodes) front_ = {-1};
  }
  // The nodes whose rows give the next level, -1 for the root; none: the tree is done.
  const std::vector<int64_t>& front() const { return front_; }
  size_t width() const { return std::min(shape_.width, shape_.nodes); }
  // level: the children of each node of the front.
  void grow(const std::vector<Child>* level, const std::vector<int64_t>& target_ids);
  Node& node(int64_t at) { return nodes_[at]; }
  size_t root() const { return root_; }
  size_t row(int64_t at) const { return at < 0 ? root_ : nodes_[at].row; }
  // The best nodes in order of creation; a parent counts among these.
  std::vector<Node> kept() const;

 private:
  std::vector<size_t> best() const;

  TreeShape shape_;
  size_t root_, level_ = 0;
  std::vector<int64_t> front_;
  std::vector<Node> nodes_;
};

// Run a head's rows and, into the same output, those of a tree on each root, all together level by
// level. batch: wanted are the roots of the trees that have a front, in order.
void expand(Step& step, const Model& model, Batch batch, const Cache& cache, Output& out,
            std::vector<DraftTree>& trees);

}  // namespace slip
