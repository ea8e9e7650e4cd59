// What the Python module says of bad input.
#pragma once
#include <stdexcept>

namespace slip {

inline void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

}  // namespace slip
