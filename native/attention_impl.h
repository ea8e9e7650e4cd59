// Attention of some query rows over keys and values that they share. The sums of each run over
// positions in their order; keys and values are loaded once for as many queries as registers hold.
#pragma once
#include <type_traits>

#include "rows_impl.h"

namespace slip {
namespace SLIP_NAMESPACE {

inline float one(const float* p) { return *p; }
inline float one(const uint16_t* p) {
  uint32_t u = (uint32_t)*p << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

constexpr size_t kRowsAhead = 32;  // of values

// Q queries against B blocks of 16 positions, each key loaded once: q . k, terms in the order of d.
template <int Q, int B, class T>
void score_blocks(const Query* q, const T* keys, size_t dim, size_t position) {
  V acc[Q][B];
  for (auto& row : acc)
    for (auto& v : row) v = zero();
  for (size_t d = 0; d < dim; ++d) {
    V key[B];
    for (int b = 0; b < B; ++b) {
      key[b] = get(keys + (b * dim + d) * kLanes);
      prefetch(keys + ((B + b) * dim + d) * kLanes);
    }
    for (int i = 0; i < Q; ++i) {
      V x = set1(q[i].query[d]);
      for (int b = 0; b < B; ++b) acc[i][b] = fma(x, key[b], acc[i][b]);
    }
  }
  for (int i = 0; i < Q; ++i)
    for (int b = 0; b < B; ++b) store(q[i].scores + position + b * kLanes, acc[i][b]);
}

// Q queries add weight times value over positions begin ... end - 1, in that order, to N * 16
// dimensions from ``from`` on; ``values`` at the first position.
template <int Q, int N, class T>
void add_values(const Query* q, const T* values, size_t dim, size_t from, size_t begin,
                size_t end) {
  V acc[Q][N];
  for (int i = 0; i < Q; ++i)
    for (int n = 0; n < N; ++n) acc[i][n] = load(q[i].out + from + n * kLanes);
  for (size_t j = begin; j < end; ++j, values += dim) {
    V value[N];
    for (int n = 0; n < N; ++n) {
      value[n] = get(values + from + n * kLanes);
      prefetch(values + kRowsAhead * dim + from + n * kLanes);
    }
    for (int i = 0; i < Q; ++i) {
      V weight = set1(q[i].scores[j]);
      for (int n = 0; n < N; ++n) acc[i][n] = fma(weight, value[n], acc[i][n]);
    }
  }
  for (int i = 0; i < Q; ++i)
    for (int n = 0; n < N; ++n) store(q[i].out + from + n * kLanes, acc[i][n]);
}

template <int Q, class T>
void add_values(const Query* q, const T* values, size_t dim, size_t begin, size_t end) {
  constexpr int N = SLIP_BLOCKS;
  if (begin >= end) return;
  size_t d = 0;
  for (; d + N * kLanes <= dim; d += N * kLanes) add_values<Q, N>(q, values, dim, d, begin, end);
  for (; d + kLanes <= dim; d += kLanes) add_values<Q, 1>(q, values, dim, d, begin, end);
  for (; d < dim; ++d)
    for (int i = 0; i < Q; ++i)
      for (size_t j = begin; j < end; ++j)
        q[i].out[d] = std::fma(q[i].scores[j], one(values + (j - begin) * dim + d), q[i].out[d]);
}

// Q queries at once where all of them see a position, one by one at the edges: what a query may
// not see is never touched, whatever is there.
template <int Q, class T>
void weigh(const Query* q, const T* values, size_t dim, size_t begin, size_t end) {
  size_t from = begin, to = end;
  for (int i = 0; i < Q; ++i) from = std::max(from, q[i].first), to = std::min(to, q[i].count);
  if (from >= to) from = to = end;
  auto alone = [&](size_t a, size_t b) {
    for (int i = 0; i < Q; ++i) {
      size_t first = std::max(a, q[i].first);
      if (first < b)
        add_values<1>(q + i, values + (first - begin) * dim, dim, first, std::min(b, q[i].count));
    }
  };
  alone(begin, from);
  if (from < to) add_values<Q>(q, values + (from - begin) * dim, dim, from, to);
  alone(to, end);
}

// The queries in groups that fit the registers: kernel(Q as a constant, the first of Q queries).
template <int Q = SLIP_QUERIES, class Kernel>
void by_queries(const Query* q, size_t n, const Kernel& kernel) {
  for (; n >= Q; n -= Q, q += Q) kernel(std::integral_constant<int, Q>(), q);
  if constexpr (Q > 1)
    if (n) by_queries<Q - 1>(q, n, kernel);
}

// Blocks begin ... end - 1, ``keys`` at the first; all queries while a few blocks are in the cache.
template <class T>
void score(const Query* q, size_t n, const T* keys, size_t dim, size_t begin, size_t end) {
  for (size_t b = begin, width; b < end; b += width, keys += width * dim * kLanes) {
    width = b + SLIP_BLOCKS <= end ? SLIP_BLOCKS : 1;
    by_queries(q, n, [&](auto count, const Query* some) {
      constexpr int Q = decltype(count)::value;
      if (width == 1)
        score_blocks<Q, 1>(some, keys, dim, b * kLanes);
      else
        score_blocks<Q, SLIP_BLOCKS>(some, keys, dim, b * kLanes);
    });
  }
}

// Positions begin ... end - 1, ``values`` at the first; likewise.
template <class T>
void weigh_all(const Query* q, size_t n, const T* values, size_t dim, size_t begin, size_t end) {
  size_t together = std::max<size_t>(1, 4096 / dim);
  for (; begin < end; begin += together, values += together * dim)
    by_queries(q, n, [&](auto count, const Query* some) {
      weigh<decltype(count)::value>(some, values, dim, begin, std::min(begin + together, end));
    });
}

// Scores into weights, not yet divided by their sum, which is returned.
inline float softmax(const Query& q, float softcap) {
  float* scores = q.scores;
  size_t begin = q.first / kLanes * kLanes, end = (q.count + kLanes - 1) / kLanes * kLanes;
  auto hide = [&](size_t j, float value) {  // of 16 positions those that are not to be seen
    if (j >= q.first && j + kLanes <= q.count) return;
    for (size_t i = j; i < j + kLanes; ++i)
      if (i < q.first || i >= q.count) scores[i] = value;
  };
  for (size_t j = begin; j < end; j += kLanes) {
    if (softcap > 0)
      store(scores + j, mul(tanh(div(load(scores + j), set1(softcap))), set1(softcap)));
    hide(j, -INFINITY);
  }
  float most = greatest(scores + begin, end - begin);
  V sums = zero();
  for (size_t j = begin; j < end; j += kLanes) {
    store(scores + j, exp(sub(load(scores + j), set1(most))));
    hide(j, 0);  // exp has a floor
    sums = add(sums, load(scores + j));
  }
  return sum_lanes(sums);
}

template <class T>
void attend(const Attention& a) {
  const Query* q = a.queries;
  size_t first = q->first, shared = a.past / kLanes, block = a.dim * kLanes;
  for (size_t i = 0; i < a.n; ++i) first = std::min(first, q[i].first);
  // for all queries the committed positions, for those of one tail the positions of this step
  auto tails = [&](auto part) {
    for (size_t i = 0, n; i < a.n; i += n) {
      for (n = 1; i + n < a.n && q[i + n].tail_keys == q[i].tail_keys;) ++n;
      part(q + i, n);
    }
  };
  size_t begin = first / kLanes, middle = std::max(begin, shared);
  if (begin < shared)
    score(q, a.n, (const T*)a.keys + begin * block, a.dim, begin, shared);
  tails([&](const Query* some, size_t n) {
    size_t end = (some[n - 1].count + kLanes - 1) / kLanes;
    score(some, n, (const T*)some->tail_keys + (middle - shared) * block, a.dim, middle, end);
  });
  float total[kMaxQueries];
  for (size_t i = 0; i < a.n; ++i) {
    total[i] = softmax(q[i], a.softcap);
    std::fill_n(q[i].out, a.dim, 0.0f);
  }
  if (first < a.past)
    weigh_all(q, a.n, (const T*)a.values + first * a.dim, a.dim, first, a.past);
  size_t from = std::max(a.past, first);
  tails([&](const Query* some, size_t n) {
    const T* values = (const T*)some->tail_values + (from - a.past) * a.dim;
    weigh_all(some, n, values, a.dim, from, some[n - 1].count);
  });
  for (size_t i = 0; i < a.n; ++i) {
    float inverse = 1.0f / total[i];
    for (size_t d = 0; d < a.dim; ++d) q[i].out[d] *= inverse;
  }
}

}  // namespace SLIP_NAMESPACE
}  // namespace slip
