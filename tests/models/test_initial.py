"""Initial weights depend on a model's seed alone."""

import pytest
import torch

from mercer.models.config import ModelConfig
from mercer.models.decision import DecisionTransformer
from mercer.models.decision_config import DecisionConfig
from mercer.models.decoder import DecoderLM
from mercer.models.encoder import Encoder
from mercer.models.encoder_config import EncoderConfig
from mercer.models.seq2seq import Seq2Seq
from mercer.models.seq2seq_config import Seq2SeqConfig
from mercer.models.vision import VisionEncoder
from mercer.models.vision_config import VisionConfig

SHAPE = {"dim": 32, "layers": 2, "heads": 4, "norm": "layer", "bias": True, "feedforward": "gelu"}
MODELS = {
    "decoder": (DecoderLM, ModelConfig, {"vocab_size": 20, "position": "learned", "max_length": 16}),
    "encoder": (Encoder, EncoderConfig, {"vocab_size": 20, "token_types": 2, "head": "tokens"}),
    "classes": (Encoder, EncoderConfig, {"vocab_size": 20, "pool": True, "head": "classes", "classes": 3}),
    "text": (Seq2Seq, Seq2SeqConfig, {"vocab_size": 20, "position": "t5", "score_bias": True}),
    "frames": (Seq2Seq, Seq2SeqConfig, {"vocab_size": 20, "source": "frames", "bins": 8, "position": "learned"}),
    "vision": (VisionEncoder, VisionConfig, {"image": 16, "patch": 4, "head": "classes", "classes": 3}),
    "decisions": (DecisionTransformer, DecisionConfig, {"observed": 5, "actions": 3, "max_length": 16}),
}


@pytest.mark.parametrize("name", MODELS)
def test_one_seed_gives_one_model(name):
    kind, config, values = MODELS[name]
    torch.manual_seed(1)
    model = kind(config(**SHAPE, **values, seed=5))
    before = torch.get_rng_state()
    again = kind(config(**SHAPE, **values, seed=5))
    assert torch.equal(torch.get_rng_state(), before), "the caller's stream is left alone"
    other = kind(config(**SHAPE, **values, seed=6))
    for (path, first), second, third in zip(
        model.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(first, second), path
        constant = bool((first == first.flatten()[0]).all())  # biases, norms, a token of classes
        sinusoids = name == "frames" and path == "encoder.positions.weight"
        assert constant or sinusoids or not torch.equal(first, third), path
    torch.manual_seed(3)
    late = kind(config(**SHAPE, **values, seed=5))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), late.parameters(), strict=True))
