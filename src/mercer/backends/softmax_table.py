"""Names of rows and entries in the tables that the kernels of exact attention take (no Numba here)."""

QUERY, KEY, VALUE, OUT, LOG_SUM, UPSTREAM, LOG_UPSTREAM, GRAD_QUERY, GRAD_KEY, GRAD_VALUE, SLOPES = range(11)
QUERY_AT, QUERY_LOW, QUERY_HIGH, KEY_AT, KEY_LOW, KEY_HIGH = range(11, 17)
"""Rows of the table of tensors, whose columns are those of `mercer.backends.polynomial_table`. The last six are
positions, 32-bit integers: of every token, and the lowest and highest one of every 16 tokens."""
TENSORS = 17
BATCH, HEADS, GROUP, QUERIES, KEYS, DIM, WIDTH, LEFT, RIGHT, NARROW, CHUNK, SPLIT, SPLITS = range(13)
"""Sizes and switches: batch, key heads, query heads a key head, Lq, Lk, D, Dv, how far a query sees back and ahead,
whether products are of bfloat16, tiles of 16 queries in an item of the forward pass, tiles of 16 keys in an item of the
backward pass, and how many such items a key head has."""
PACKED_KEYS, PACKED_VALUES, GRAD_STRIDE = range(13, 16)
"""Addresses of packed keys and values, and bytes from one split's gradients of queries to the next one's."""
SIZES = 16
HIDDEN_KEY, HIDDEN_QUERY = 3 << 29, -(1 << 30)
"""Positions that see nothing and are seen by nothing."""
UNLIMITED = 1 << 29
"""What stands for no limit to how far a query sees."""
FARTHEST = 1 << 28
"""Positions are less than this, forwards and backwards."""
