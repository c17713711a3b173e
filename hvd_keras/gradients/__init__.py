"""One step's gradients: what the ranks agree on, the exchange, clipping, sharded state (ZeRO-1)."""
