#include "core/math/loops_body.h"

namespace hvd {

Loops baseline_loops() { return loops_of("baseline"); }

}  // namespace hvd
