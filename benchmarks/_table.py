"""A record of `linear_attention` as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks._record import Case, Record


def lines(record: Record) -> Iterator[str]:
    """The limits, then every case with its contestants."""
    yield ""
    yield "Limits of this machine, best of all tries:"
    for dtype, rates in record.limits.products.items():
        told = ", ".join(f"{shape}: {rate / 1e9:,.0f}" for shape, rate in rates.items())
        yield f"  products in {dtype}, GFLOP/s: {told}"
    yield f"  memory, GB/s: copy {record.limits.copy_bytes / 1e9:.1f}, read {record.limits.read_bytes / 1e9:.1f}"
    for name, reason in record.missing.items():
        yield f"  {name} does not take part: {reason}"
    for case in record.cases:
        yield ""
        yield from _case(case)


def _case(case: Case) -> Iterator[str]:
    direction = "forward and backward" if case.backward else "forward"
    yield (
        f"{case.task}, {case.shape}, {case.dtype}, {direction}: {case.flops / 1e9:.3g} GFLOP, "
        f"{case.bytes / 1e6:.4g} MB, at best {1e3 * case.limit_seconds:.3g} ms"
    )
    yield f"  {'':52}{'ms':>9}  {'quartiles':18}{'/ limit':>8}{'/ ours':>8}"
    for row in case.rows:
        if row.seconds is None:
            yield f"  {row.name:52}{'-':>9}  left out: {row.skipped}"
            continue
        low, high = (f"{1e3 * x:.4g}" for x in (row.seconds.low, row.seconds.high))
        ratio = f"{row.ratio.median:8.2f}" if row.ratio else " " * 8
        limit = f"{row.times_limit:8.1f}" if row.times_limit is not None else " " * 8
        note = f"  ({row.differs})" if row.differs else ""
        yield f"  {row.name:52}{1e3 * row.seconds.median:9.4g}  {f'{low} to {high}':18}{limit}{ratio}{note}"
