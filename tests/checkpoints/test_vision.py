"""ViT of transformers and the same here: one number for each way of asking."""

import json

import pytest
import torch
from tests.checkpoints.measure import BOUND, error, gradient_error, hidden_error, written_error
from tests.checkpoints.zoo import make

from mercer import checkpoints
from mercer.errors import InvalidArgument, Unsupported
from mercer.models.vision import VisionEncoder
from mercer.models.vision_config import VisionConfig

pytestmark = pytest.mark.peers

_SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
_SQUARE = {"image_size": 16, "patch_size": 4}
MODELS = {
    "classes": ("ViTForImageClassification", _SHAPE | _SQUARE | {"num_labels": 5}),
    "two classes, no biases": ("ViTForImageClassification", _SHAPE | _SQUARE | {"qkv_bias": False}),
    "bare": ("ViTModel", _SHAPE | _SQUARE | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "oblong": ("ViTModel", _SHAPE | {"image_size": [18, 12], "patch_size": [4, 3], "num_channels": 1}),
}


def pictures(model):
    config = model.config
    shape = (2, config.channels, *config.image)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def answer(model, images):
    result = model(images)
    return result.logits if "logits" in result else result.last_hidden_state


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_is_the_model_that_was_saved(name, tmp_path, record_property):
    folder = tmp_path / "model"
    theirs = make(*MODELS[name], folder)
    ours = checkpoints.load(folder)
    images = pictures(ours)
    with torch.no_grad():
        result = theirs(images, output_hidden_states=True)
        errors = {
            "answer": error(ours(images), answer(theirs, images)),
            "hidden": hidden_error(lambda: ours(images), ours.blocks, result.hidden_states),
        }
        if "pooler_output" in result:
            errors["pooled"] = error(ours.pooler(ours.hidden(images)), result.pooler_output)
    errors["written"] = written_error(ours, theirs, folder, lambda model: answer(model, images))
    errors["gradients"] = gradient_error(ours, theirs, lambda model: answer(model, images), (images,), folder)
    record_property("errors", json.dumps(errors))  # for the page of them all, scripts/parity_docs.py
    assert max(errors.values()) < BOUND, errors


def test_attention_is_swapped(tmp_path):
    make(*MODELS["classes"], tmp_path)
    plain = checkpoints.load(tmp_path)
    images = pictures(plain)
    swapped = checkpoints.load(tmp_path, attention=["elu-sum", "softmax"])
    assert torch.equal(swapped(images), plain.with_attention(["elu-sum", "softmax"])(images))
    assert not torch.allclose(swapped(images), plain(images))


@pytest.mark.parametrize("shape", [(2, 3, 20, 16), (2, 3, 16, 20), (2, 1, 16, 16), (3, 16, 16)])
def test_images_of_another_size_are_refused(shape):
    model = VisionEncoder(VisionConfig(dim=32, layers=1, heads=4, image=16, patch=4))
    with pytest.raises(InvalidArgument, match=r"the model takes images \[B, 3, 16, 16\] of floating-point numbers"):
        model(torch.zeros(shape))
    with pytest.raises(InvalidArgument, match=r"got torch.uint8 of"):
        model(torch.zeros(shape, dtype=torch.uint8))


def test_what_cannot_be_computed_is_refused(tmp_path):
    make("ViTModel", _SHAPE | _SQUARE | {"pooler_output_size": 16}, tmp_path)
    with pytest.raises(Unsupported, match="pooler_output_size is 16, and only 32 can be computed"):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"patch": 300}, "patch .300, 300. is larger than image .224, 224."),
        ({"head": "classes"}, 'classes goes with head "classes"'),
        ({"image": [16]}, "image"),
        ({"image": True}, "image"),
        ({"patch": [4, 0]}, "patch.1 must be 1 or more"),
    ],
)
def test_configurations_that_do_not_fit(values, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        VisionConfig(**values)


def test_a_model_with_a_pooled_head_is_no_vit(tmp_path):
    values = {"dim": 32, "layers": 1, "heads": 4, "norm": "layer", "feedforward": "gelu", "bias": True, "image": 16}
    pooled = VisionEncoder(VisionConfig(**values, head="classes", classes=3, pool=True))
    assert pooled(pictures(pooled)).shape == (2, 3)
    with pytest.raises(Unsupported, match="vit has no way to say pool = True"):
        checkpoints.save(pooled, tmp_path / "model")
