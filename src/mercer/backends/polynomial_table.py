"""Names of rows, columns and entries in the tables that the polynomial scan's kernels take (no Numba here)."""

ADDRESS, HALF, BATCH, HEAD, TOKEN = range(5)
"""Columns of the table of tensors: address (0: not there), 1 for bfloat16, strides in bytes."""
QUERY, KEY, VALUE, OUT, DENOMINATOR, LOG, WEIGHT, STATE, MASS, FINAL, FINAL_MASS, UPSTREAM, SLOPE = range(13)
GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_STATE, GRAD_MASS, GRAD_FINAL, GRAD_FINAL_MASS, TILES = range(13, 21)
"""Its rows; SLOPE is the gradient of the denominators, TILES the pair weights and their slopes of every block."""
TENSORS = 21
HEADS, GROUP, LENGTH, DIM, VALUE_DIM, FEATURES, MONOMIALS, MAP, SUMS, DIVIDES, ABREAST = range(11)
"""Sizes and switches: key heads, queries a key head, tokens, D, Dv, features, monomials below the highest degree, map,
whether there are denominators, whether to divide by them, key heads that go from block to block together."""
IDENTITY, ELU, RELU = range(3)
"""Maps."""
