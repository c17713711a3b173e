// The only place where the core reads its environment: once, at init.
#pragma once

#include "core/status.h"

namespace hvd {

struct Settings {
  // HVD_STALL_WARNING_SECONDS: how long requests may wait for other ranks before a warning names
  // them; 0: never.
  double stall_warning_seconds = 60.0;
  // HVD_TIMEOUT_SECONDS: how long before they fail on all ranks; 0: never.
  double timeout_seconds = 600.0;
};

Status read_settings(Settings* settings);

}  // namespace hvd
