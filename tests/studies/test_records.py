import json
from pathlib import Path

import jsonschema
import pytest
from tests.studies import examples

from mercer.errors import InvalidArgument
from mercer.studies.records import AnyRecord, read_record, write_record
from mercer.studies.records.common import Interval

RECORDS = [
    examples.orders(),
    examples.orders(seeds=3, finished=False),
    examples.recall(),
    examples.cost(),
    examples.approximation(),
    examples.positions(),
    examples.positions(seeds=3),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: f"{r.study}-{r.finished}")
def test_a_record_comes_back_as_it_was_written(record: AnyRecord, tmp_path: Path) -> None:
    path = write_record(record, tmp_path)
    assert path.name == f"{record.study}.json"
    assert read_record(path) == record


@pytest.mark.parametrize("record", RECORDS[1:], ids=lambda r: r.study)
def test_the_schema_beside_it_describes_it(record: AnyRecord, tmp_path: Path) -> None:
    path = write_record(record, tmp_path)
    schema = json.loads(path.with_suffix(".schema.json").read_text())
    content = json.loads(path.read_text())
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["additionalProperties"] is False
    assert set(content) == set(schema["properties"])
    jsonschema.validate(content, schema, cls=jsonschema.Draft202012Validator)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content | {"schema_version": 2}, schema, cls=jsonschema.Draft202012Validator)


def test_other_json_is_refused_with_the_place(tmp_path: Path) -> None:
    path = write_record(examples.orders(), tmp_path)
    content = json.loads(path.read_text())
    content["trials"][0]["seed"] = "many"
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidArgument, match=r"trials\.0\.seed"):
        read_record(path)
    path.write_text("{}")
    with pytest.raises(InvalidArgument, match="is not the JSON of a mercer study: "):
        read_record(path)
    path.write_text("not JSON")
    with pytest.raises(InvalidArgument, match="is not the JSON of a mercer study: "):
        read_record(path)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_record(tmp_path / "missing.json")


def test_numbers_are_finite() -> None:
    with pytest.raises(ValueError, match="finite"):
        Interval(mean=float("nan"), count=1)
