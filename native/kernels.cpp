#include "kernels.h"

#include <stdexcept>

namespace slip {

std::vector<const Kernels*> running_kernels() {
  std::vector<const Kernels*> all, running;
#if defined(__x86_64__)
  all = {avx512_kernels(), avx2_kernels()};
#elif defined(__aarch64__)
  all = {neon_kernels()};
#endif
  all.push_back(portable_kernels());
  for (auto* k : all)
    if (k) running.push_back(k);
  return running;
}

const Kernels& best_kernels(const std::string& name) {
  for (auto* k : running_kernels())
    if (name.empty() || name == k->name) return *k;
  throw std::invalid_argument("no kernels of the name " + name + " run on this processor");
}

}  // namespace slip
