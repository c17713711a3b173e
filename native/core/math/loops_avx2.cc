// Compiled with -mavx2 -mf16c, see CMakeLists.txt.
#if defined(__x86_64__)
#include "core/math/loops_body.h"

namespace hvd {

Loops avx2_loops() { return loops_of("avx2"); }

}  // namespace hvd
#endif
