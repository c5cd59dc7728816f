"""`numerics` (in `scope`): float32 products as a TPU computes them, or exactly.

See `docs/numerics.md` for what is emulated, how well, and what it costs.
"""
