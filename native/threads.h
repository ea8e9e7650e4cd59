// One pool. Work is split into contiguous parts, one a thread: what a part computes never depends
// on how many there are.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace slip {

class Pool {
 public:
  std::mutex in_use;  // held by who runs parts, where several may want to

  explicit Pool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      ++round_;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int threads() const { return (int)workers_.size() + 1; }

  // part(begin, end, thread) for all of 0 ... items, each once; returns when all are done.
  // grain: a thread that would get fewer items is not worth waking.
  template <class Part>
  void run(size_t items, size_t grain, const Part& part) {
    int count = threads();
    if (count == 1 || items < 2 * grain) return part(0, items, 0);
    job_ = [&](int t) {
      size_t begin = items * t / count, end = items * (t + 1) / count;
      if (begin < end) part(begin, end, t);
    };
    running_.store(count - 1, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++round_;
    }
    wake_.notify_all();
    job_(0);
    for (int spin = 0; running_.load(std::memory_order_acquire); ++spin)
      spin < kSpins ? pause() : std::this_thread::yield();
  }

 private:
  static constexpr int kSpins = 4000;  // some 50 µs: then another process wants this core

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
  }

  void work(int index) {
    for (size_t seen = 0;;) {
      // the next part of a step follows within microseconds: look for it before going to sleep
      for (int spin = 0; spin < kSpins && round_.load(std::memory_order_acquire) == seen; ++spin)
        pause();
      if (round_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
      }
      seen = round_.load(std::memory_order_acquire);
      if (stopping_) return;
      job_(index);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::function<void(int)> job_;
  std::atomic<size_t> round_{0};
  std::atomic<int> running_{0};
  bool stopping_ = false;
};

}  // namespace slip
