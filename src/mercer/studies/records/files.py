"""Reading and writing records: JSON beside its schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from mercer.errors import InvalidArgument
from mercer.runtime.files import write_file
from mercer.studies.records.approximation import ApproximationRecord
from mercer.studies.records.cost import CostRecord
from mercer.studies.records.orders import OrdersRecord
from mercer.studies.records.positions import PositionsRecord
from mercer.studies.records.recall import RecallRecord

AnyRecord = OrdersRecord | RecallRecord | CostRecord | ApproximationRecord | PositionsRecord
StudyRecord = Annotated[AnyRecord, Field(discriminator="study")]
STUDIES = ("orders", "recall", "cost", "approximation", "positions")
_adapter: TypeAdapter[AnyRecord] = TypeAdapter(StudyRecord)


def write_record(record: AnyRecord, folder: Path) -> Path:
    """Write ``<study>.json`` and ``<study>.schema.json`` into ``folder``; return the path of the first."""
    path = folder / f"{record.study}.json"
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **type(record).model_json_schema()}
    write_file(path.with_suffix(".schema.json"), json.dumps(schema, indent=2) + "\n")
    write_file(path, record.model_dump_json(indent=1) + "\n")
    return path


def read_record(path: Path) -> AnyRecord:
    """Read a study's JSON. Raises :class:`InvalidArgument` for anything else, naming the first thing wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {(error.strerror or str(error)).lower()}.") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is not the JSON of a mercer study: it is not text.") from error
    try:
        return _adapter.validate_json(text)
    except ValidationError as error:
        raise InvalidArgument(f"{path} is not the JSON of a mercer study: {_fault(error)}.") from error


def _fault(error: ValidationError) -> str:
    """The first thing wrong, in plain words."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return "it is not valid JSON"
    studies = f"its key 'study' must be {', '.join(STUDIES[:-1])} or {STUDIES[-1]}"
    if first["type"].startswith("union_tag") or len(first["loc"]) < 2:
        return studies
    where = ".".join(map(str, first["loc"][1:]))  # the first is the kind of study
    plain = {"missing": "is missing", "extra_forbidden": "is unknown to this version"}
    return f"{where} {plain.get(first['type'], 'has a value that does not fit')}"
