"""Where `short_convolution` and its kernels agree: rows of the table of tensors, sizes, and how work is cut."""

X, OUT, GRAD_OUT, GRAD_X = range(4)
"""Rows of the table, for tensors with a row per token: address (0: not there), whether bfloat16, strides in bytes over
batch rows and tokens."""
PAST, FINAL, GRAD_FINAL, GRAD_PAST, WEIGHT, BIAS, COUNTS, GRAD_WEIGHT = range(4, 12)
"""Contiguous, of which the address alone is read. Tails and their gradients: [B, width - 1, C] float32. WEIGHT: [width,
C]; BIAS: [C]. COUNTS: int64 [B]. GRAD_WEIGHT: [B, runs, width + 1, C], the bias's last."""
ROWS = 12
HALF, BATCH, TOKEN = 1, 2, 3

LENGTH, CHANNELS, WIDTH, SILU = range(4)

CHUNK = 256
"""Tokens of a run, which one thread takes. Sums over tokens are cut there, whatever the number of threads."""
