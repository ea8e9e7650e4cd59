// Model and cache as Python holds them: everything is checked here, so that no input can crash the
// process.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "checks.h"
#include "expand.h"
#include "step.h"

namespace slip {

using Indices = std::vector<int64_t>;

class NativeModel {
 public:
  NativeModel(nanobind::dict config, nanobind::dict weights, int threads,
              const std::string& kernels);
  // An EAGLE-3 head, on its target's threads and, where it brings none, embedding.
  NativeModel(nanobind::dict config, nanobind::dict weights, const NativeModel& target);
  void add_layer(nanobind::dict weights, size_t window, size_t rotary);
  const Model& model() const { return model_; }
  const Kernels& kernels() const { return step_->kernels(); }
  size_t bytes() const;  // of its own weights
  bool is_head() const { return model_.fuse != nullptr; }
  void run(const Batch& batch, const Cache& cache, Output& out) {
    size_t hidden = is_head() ? batch.tokens.size() * model_.config.hidden : 0;
    require(batch.hidden.size() == hidden, "an EAGLE-3 head, and it alone, takes hidden states");
    auto lock = alone();
    step_->run(batch, cache, out);
  }
  // Of a head alone; ``features`` [rows][columns of ``fuse``].
  void fuse(const float* features, size_t rows, float* hidden) {
    auto lock = alone();
    step_->fuse(features, rows, hidden);
  }
  void expand(Batch batch, const Floats& features, const Cache& cache, Output& out,
              std::vector<DraftTree>& trees) {
    batch.hidden.resize(batch.tokens.size() * model_.config.hidden);
    auto lock = alone();
    step_->fuse(features.data(), batch.tokens.size(), batch.hidden.data());
    slip::expand(*step_, model_, std::move(batch), cache, out, trees);
  }

 private:
  // A step's room and its threads serve one run at a time.
  std::unique_lock<std::mutex> alone() { return std::unique_lock(step_->pool()->in_use); }

  Model model_;
  std::unique_ptr<Step> step_;
  bool own_embedding_ = true;
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
  size_t max_length() const { return max_length_; }
  // A layer that came later has no storage here.
  bool fits(const NativeModel& model) const {
    return &model == &model_ && model.model().layers.size() == layers_;
  }

  // Append rows of a step to slots that hold ``lengths`` tokens; a request each. Room comes first:
  // an error leaves the cache as it was, as far as can be seen.
  void commit(const Output& output, const Indices& slots, const Indices& lengths,
              const std::vector<Indices>& rows);

 private:
  static constexpr size_t kFirst = 256;  // tokens of room at first
  NativeModel& model_;
  size_t max_length_, layers_;
  Cache cache_;
};

}  // namespace slip
