#pragma once

// Everything else stays hidden in its library.
#define HVD_EXPORT __attribute__((visibility("default")))
