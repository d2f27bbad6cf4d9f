"""``--attention`` on a model that has mixers."""

import pytest

from mercer.cli.locate import open_model
from mercer.errors import InvalidArgument
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.io import save_model

SIZES = {"vocab_size": 256, "dim": 16, "heads": 2}


@pytest.mark.parametrize(
    ("typed", "layers"),
    [
        ("taylor2-sum", ["mamba", "mamba", "mamba", "taylor2-sum"]),
        ("3*mamba, elu-sum", ["mamba", "mamba", "mamba", "elu-sum"]),
    ],
)
def test_a_swap_keeps_the_mixers(tmp_path, typed, layers):
    save_model(DecoderLM(ModelConfig(**SIZES, layers=4, attention="3*mamba,softmax")), tmp_path)
    assert list(open_model(str(tmp_path), attention=typed).model.config.attentions) == layers
    with pytest.raises(InvalidArgument, match="'mamba', and 'elu-sum' cannot take its weights"):
        open_model(str(tmp_path), attention="elu-sum,mamba")


def test_a_model_of_mixers_has_nothing_to_swap(tmp_path):
    save_model(DecoderLM(ModelConfig(**SIZES, layers=2, attention="mamba")), tmp_path)
    with pytest.raises(InvalidArgument, match="no layer of this model is an attention: they are mamba"):
        open_model(str(tmp_path), attention="taylor2-sum")
