"""Where `selective_scan` and its kernels agree: rows of the table of tensors, sizes, and how work is cut."""

X, STEP, GATE, READ, WRITE, OUT, GRAD_OUT, GRAD_X, GRAD_STEP, GRAD_GATE = range(10)
"""Rows of the table, for tensors with a row per token: address (0: not there), whether bfloat16, strides in bytes over
batch rows and tokens. READ and WRITE are C and B, in float32."""
STATE, FINAL, MARKS, GRAD_FINAL, GRAD_STATE, GRAD_RATES, GRAD_SKIP, GRAD_BIAS, GRAD_BOTH = range(10, 19)
"""Contiguous float32, of which the address alone is read. STATE, FINAL and their gradients are [B, N, D]. MARKS: states
before each chunk of tokens, [B, chunks, N, D]. GRAD_RATES: [B, N, D]; GRAD_SKIP and GRAD_BIAS: [B, D]. GRAD_BOTH: the
gradients of B and then C from each group of channels, [groups, B, L, 2, N]."""
RATES, SKIP, BIAS, LENGTHS = range(19, 23)
"""RATES: A, [D, N]; SKIP: the factor of x; BIAS: of the steps before softplus; both [D] float32. LENGTHS: int64
[B]."""
ROWS = 23
HALF, BATCH, TOKEN = 1, 2, 3

BATCHES, LENGTH, CHANNELS, STATES, SOFTPLUS = range(5)

CHUNK = 32
"""Tokens from one kept state to the next; the backward pass makes the states in between again."""
GROUP = 128
"""Channels that one thread takes at a time. Sums over channels are cut there, whatever the number of threads."""
