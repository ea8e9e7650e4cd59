// Plain C++: any processor, and the reference that the others are tested against.
#define SLIP_NAMESPACE portable
#define SLIP_QUERIES 2
#define SLIP_BLOCKS 2
#include "kernels_impl.h"

const slip::Kernels* slip::portable_kernels() { return portable::kernels("portable"); }
