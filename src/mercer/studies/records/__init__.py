"""What the studies write: validated records, their JSON files and JSON schemas. Nothing here imports torch."""

from mercer.studies.records.approximation import ApproximationRecord
from mercer.studies.records.common import Corpus, Finding, Interval, Provenance, Record
from mercer.studies.records.cost import CostRecord
from mercer.studies.records.files import AnyRecord, StudyRecord, read_record, write_record
from mercer.studies.records.orders import OrdersRecord
from mercer.studies.records.positions import PositionsRecord
from mercer.studies.records.recall import RecallRecord

__all__ = [
    "AnyRecord",
    "ApproximationRecord",
    "Corpus",
    "CostRecord",
    "Finding",
    "Interval",
    "OrdersRecord",
    "PositionsRecord",
    "Provenance",
    "RecallRecord",
    "Record",
    "StudyRecord",
    "read_record",
    "write_record",
]
