"""Names of rows, columns and entries in the tables that the matrix recurrence's kernels take (no Numba here)."""

ADDRESS, HALF, BATCH, HEAD, TOKEN, PART = range(6)
COLUMNS = 6
"""Columns of the table of tensors: address (0: not there), 1 for bfloat16, strides in bytes. A part is a piece of the
value's columns whose gradients of queries and keys are kept apart from those of the others."""
QUERY, KEY, VALUE, LOG, A, B, BONUS, STATE, OUT, FINAL, REMOVED, KEPT = range(12)
UPSTREAM, GRAD_FINAL, GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_LOG, GRAD_A, GRAD_B, GRAD_BONUS, GRAD_STATE = range(12, 22)
BETA, GRAD_BETA = 22, 23
"""Its rows; REMOVED is what each token removes, b^T S, or with the delta rule what it writes; KEPT, the states before
every `OUTER` tokens."""
BY_PART = (GRAD_QUERY, GRAD_KEY, GRAD_LOG, GRAD_A, GRAD_B, GRAD_BONUS, GRAD_BETA)
TENSORS = 24
HEADS, LENGTH, DIM, VALUE_DIM, CHANNELS, PARTS, GROWS = range(7)
"""Sizes: heads, tokens, K, V, whether every channel has a log-decay of its own, parts that gradients are made in; not 0
afterwards if a log-decay was above 0."""
SLICE = 64
"""Columns of the value that go together: with 64 channels their state is 16 KiB."""
OUTER = 64
"""Tokens from one state that the forward pass keeps to the next."""
SPREAD = 8
"""Heads, counted over the batch, below which the slices of a head are parts that threads share; digits depend on it, so
it is not the number of threads."""
