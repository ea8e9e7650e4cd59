#include "kernels.h"

#include <stdexcept>
#include <vector>

namespace slip {

const Kernels& best_kernels(const std::string& name) {
  std::vector<const Kernels*> all;
#if defined(__x86_64__)
  all = {avx512_kernels(), avx2_kernels()};
#elif defined(__aarch64__)
  all = {neon_kernels()};
#endif
  all.push_back(portable_kernels());
  for (auto* k : all)
    if (k && (name.empty() || name == k->name)) return *k;
  throw std::invalid_argument("no kernels of the name " + name + " run on this processor");
}

}  // namespace slip
