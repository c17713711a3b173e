#pragma once

// Exports a symbol; all others are hidden.
#define HVD_EXPORT __attribute__((visibility("default")))
