"""The tables of the page of ``mercer study approximation``."""

from __future__ import annotations

from mercer.studies.records.approximation import ApproximationNeed, ApproximationRecord
from mercer.studies.report import numbers
from mercer.studies.report.blocks import Cell, Table
from mercer.studies.report.marks import label, mark


def _place(record: ApproximationRecord, name: str) -> str:
    at = next(at for at in record.inputs if at.name == name)
    return f"layer {(at.layer or 0) + 1}" if at.kind == "model" else f"D {at.dim}, spread {at.spread:g}"


def _error(value: float | None) -> str:
    return numbers.MISSING if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    return numbers.MISSING if value is None else f"{100 * value:.2g} %"


def _count(need: ApproximationNeed | None) -> Cell:
    if need is None:
        return Cell(numbers.MISSING)
    if need.number is None:
        return Cell(f"({numbers.decimal(need.exponent.mean, 2)})" if need.exponent else numbers.MISSING)
    return Cell(f"{need.number:,}")


def needs(record: ApproximationRecord) -> list[Table]:
    """Orders and numbers of features for the target."""
    tables: list[Table] = []
    orders = [need for need in record.needs if need.kind == "order"]
    if orders:
        several = len({need.series for need in orders}) > 1
        tables.append(
            Table(
                "Taylor orders",
                ("inputs", *(("series",) if several else ()), "order", "error there", "order at every score"),
                tuple(
                    (
                        Cell(_place(record, need.inputs)),
                        *((Cell(label(need.series)),) if several else ()),
                        Cell("none up to 64" if need.number is None else str(need.number)),
                        Cell(_error(need.error)),
                        Cell("above 200" if need.pointwise is None else str(need.pointwise)),
                    )
                    for need in orders
                ),
                words=2 if several else 1,
                caption=f"The smallest order whose error, and that of the next, is at most {record.target:g}; last, "
                "the order that truncates exp with this relative error at every score seen, more than outputs need.",
            )
        )
    laws = [need for need in record.needs if need.kind == "features"]
    if laws:
        series = list(dict.fromkeys(need.series for need in laws))
        found = {(need.inputs, need.series): need for need in laws}
        tables.append(
            Table(
                "Random features",
                ("inputs", *(label(name) for name in series)),
                tuple(
                    (Cell(_place(record, at)), *(_count(found.get((at, name))) for name in series))
                    for at in dict.fromkeys(need.inputs for need in laws)
                ),
                caption="How many reach the error: measured, or by the law where it holds. In brackets, where neither "
                "is so, the exponent b of error ~ m^(-b) instead: then no number can be named.",
            )
        )
        tables.append(
            Table(
                "The fitted law of random features",
                ("inputs", "series", "exponent", "law", "features", "error there"),
                tuple(
                    (
                        Cell(_place(record, need.inputs)),
                        Cell(label(need.series), mark(need.series).colour),
                        Cell(numbers.interval(need.exponent, 2)),
                        Cell("holds" if need.holds else "does not hold"),
                        Cell("cannot be said" if need.number is None else f"{need.number:,}"),
                        Cell(_error(need.error)),
                    )
                    for need in laws
                ),
                words=2,
                folded=True,
                caption="The exponent b of error ~ m^(-b), fitted to all draws, with its 95 % interval; the law holds "
                "if b is within 0.1 of 1/2, its interval within 0.2 and the last error below 1, and only then is it "
                "used for more features than were measured. The five largest numbers are fitted, orthogonal directions "
                "from a full block of D on.",
            )
        )
    return tables


def heads(record: ApproximationRecord) -> list[Table]:
    """Errors of every head of the model's layers."""
    layers = {at.name: at for at in record.inputs if at.kind == "model"}
    rows: list[tuple[Cell, ...]] = []
    most = 0
    for point in record.points:
        if point.inputs in layers:
            most = max(most, len(point.by_head))
            rows.append(
                (
                    Cell(_place(record, point.inputs)),
                    Cell(label(point.arm), mark(point.arm).colour),
                    *(Cell(_error(value)) for value in point.by_head),
                )
            )
    if not rows:
        return []
    columns = ("layer", "attention", *(f"head {head + 1}" for head in range(most)))
    return [Table("Error of every head", columns, tuple(rows), words=2, folded=True)]


def table(record: ApproximationRecord) -> list[Table]:
    """Every measurement."""
    rows = [
        (
            Cell(_place(record, p.inputs)),
            Cell(label(p.arm), mark(p.arm).colour),
            Cell(numbers.bounds(p.error)),
            Cell(numbers.bounds(p.variation)),
            Cell(_share(p.negative)),
            Cell(_share(p.not_positive)),
            Cell(_error(p.theory)),
            Cell(_error(p.median)),
            Cell(numbers.bounds(p.measured)),
        )
        for p in record.points
    ]
    if not rows:
        return []
    return [
        Table(
            "Errors",
            (
                "inputs",
                "attention",
                "relative error",
                "total variation",
                "weights below 0",
                "rows at 0 or below",
                "variance, theory",
                "median",
                "variance, drawn",
            ),
            tuple(rows),
            words=2,
            folded=True,
            caption="Brackets are 95 % intervals over rows, draws or both. Variances are relative, of a single "
            "value of the kernel, over pairs as softmax attends to them.",
        )
    ]
