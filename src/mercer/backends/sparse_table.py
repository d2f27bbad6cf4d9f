"""Names of rows and entries in the tables that the kernels of sparse attention take (no Numba here)."""

QUERY, KEY, VALUE, OUT, LOG_SUM, UPSTREAM, LOG_UPSTREAM, GRAD_QUERY, GRAD_KEY, GRAD_VALUE, SLOPES = range(11)
"""Rows of the table of tensors, whose columns are those of `mercer.backends.polynomial_table`."""
TENSORS = 11
GROUP, DIM, WIDTH, NARROW = range(4)
"""Query heads a key head, D, Dv, whether products are of bfloat16."""
KEY_HEAD, KEY_HEADS, MEMBER, MEMBERS = range(4, 8)
"""The key heads that a call takes, from the first on, and which of the query heads that share each of them."""
START, STOP, CHUNK, SPLIT, SPLITS = range(8, 13)
"""The tiles of a pass; how many of them are in an item of the forward pass; where the cuts of the pass begin, and how
many items they make in the backward pass."""
SHIFT, KEY_STRIDE, VALUE_STRIDE = range(13, 16)
"""The position of query 0 less that of key 0; bytes from one item's gradients of keys and values to the next one's."""
SIZES = 16
ENTRY, QUERY_LIMIT, KEY_LIMIT = range(3)
"""Columns of the table of rows: the batch entry, and how many of its queries and keys are there: the first ones."""
