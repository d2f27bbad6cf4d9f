"""Runs that were begun before a field was there go on: what is absent has the default."""

import json
import signal

import pytest
from tests.training.tiny import RECIPE, without_time, write_text

from mercer.errors import Interrupted, InvalidArgument
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.training.data import Corpus
from mercer.training.loop import fit
from mercer.training.trainer import train

NEWER = ("structure", "experts", "parallel", "recency", "t5_buckets", "t5_max_distance", "rope_turned", "logit_cap")
"""Fields that model configurations have got since."""
SHORT = RECIPE.model_copy(update={"steps": 8, "checkpoint_every": 3, "eval_every": 4, "log_every": 2})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus.build([write_text(tmp_path_factory.mktemp("text"))], tmp_path_factory.mktemp("cache"))


def config(corpus, **changes):
    return ModelConfig(vocab_size=corpus.vocabulary.size, dim=8, layers=2, heads=2, max_length=32, **changes)


def stop(progress):
    if progress.phase == "step" and progress.step == 5:
        signal.raise_signal(signal.SIGINT)


def begun_before(corpus, folder, **changes):
    """A run of five steps by a version that knew none of the newer fields."""
    model = config(corpus, **changes)
    old = {key: value for key, value in model.model_dump(mode="json").items() if key not in NEWER}
    with pytest.raises(Interrupted):
        fit(lambda: DecoderLM(model), old, SHORT, corpus, folder, stop)
    assert not {*NEWER} & {*json.loads((folder / "run.json").read_text())["model"]}


def test_what_the_run_does_not_say_has_its_default(corpus, tmp_path):
    begun_before(corpus, tmp_path / "old")
    whole = train(config(corpus), SHORT, corpus, tmp_path / "whole")
    resumed = train(config(corpus), SHORT, corpus, tmp_path / "old")
    assert without_time(resumed.metrics) == without_time(whole.metrics)
    assert resumed.held_out_loss == whole.held_out_loss


def test_another_value_is_refused_and_named(corpus, tmp_path):
    begun_before(corpus, tmp_path)
    message = r"begun with model.structure = 'causal', now it is 'strided\(4\)'; give the old value"
    with pytest.raises(InvalidArgument, match=message):
        train(config(corpus, structure="strided(4)"), SHORT, corpus, tmp_path)
    with pytest.raises(InvalidArgument, match=r"begun with model\.dim = 8, now it is 16"):
        train(ModelConfig(**config(corpus).model_dump() | {"dim": 16}), SHORT, corpus, tmp_path)


def test_recipes_likewise(corpus, tmp_path):
    begun_before(corpus, tmp_path)
    path = tmp_path / "run.json"
    record = json.loads(path.read_text())
    del record["train"]["clip"]
    path.write_text(json.dumps(record))
    with pytest.raises(InvalidArgument, match=r"begun with train.clip = 1.0, now it is 0.5"):
        train(config(corpus), SHORT.model_copy(update={"clip": 0.5}), corpus, tmp_path)
    assert train(config(corpus), SHORT, corpus, tmp_path).steps == 8


def test_a_field_that_this_version_does_not_know_is_another_run(corpus, tmp_path):
    begun_before(corpus, tmp_path)
    path = tmp_path / "run.json"
    record = json.loads(path.read_text())
    record["model"]["newest"] = 3
    path.write_text(json.dumps(record))
    with pytest.raises(InvalidArgument, match=r"begun with model.\w+ = "):
        train(config(corpus), SHORT, corpus, tmp_path)
