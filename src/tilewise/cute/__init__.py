"""Device library: what kernels of several generations share. Imports cutlass only, never torch."""
