"""T5's attention with its learned biases by distance, against `transformers`: encoder, decoder, and with padding."""

import pytest
import torch
from tests.parity.test_transformers import assert_same

from mercer.core.structures import Causal, Full
from mercer.nn import Attention, T5Bias

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers


def both(is_decoder, buckets=32, most=128):
    from transformers.models.t5.modeling_t5 import T5Attention

    config = transformers.T5Config(
        d_model=24, num_heads=4, d_kv=6, dropout_rate=0.0, is_decoder=is_decoder, attn_implementation="eager",
        relative_attention_num_buckets=buckets, relative_attention_max_distance=most,
    )  # fmt: skip
    peer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    generator = torch.Generator().manual_seed(0)
    layer = Attention(24, 4, structure=Causal() if is_decoder else Full(), scale=1.0)
    bias = T5Bias(4, bidirectional=not is_decoder, buckets=buckets, max_distance=most)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        layer.qkv.weight.copy_(torch.cat([peer.q.weight, peer.k.weight, peer.v.weight]))
        layer.output.weight.copy_(peer.o.weight)
        bias.weight.copy_(peer.relative_attention_bias.weight)
    return peer, layer, bias


@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 20)])
@pytest.mark.parametrize("is_decoder", [True, False])
def test_a_layer_and_the_gradient_of_its_biases(is_decoder, buckets, most):
    peer, layer, bias = both(is_decoder, buckets, most)
    length = 170
    x = torch.randn(2, length, 24, generator=torch.Generator().manual_seed(1))
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None] if is_decoder else None
    theirs, ours = peer(x, mask)[0], layer(x, structure=bias())
    assert_same(ours, theirs)
    cotangent = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(2))
    (wanted,) = torch.autograd.grad(theirs, peer.relative_attention_bias.weight, cotangent)
    (got,) = torch.autograd.grad(ours, bias.weight, cotangent)
    assert_same(got, wanted)


def test_padding_at_the_end_of_an_encoder():
    peer, layer, bias = both(False)
    x, keep = torch.randn(2, 20, 24), torch.arange(20) < torch.tensor([[20], [13]])
    mask = torch.zeros(2, 1, 1, 20).masked_fill(~keep[:, None, None], float("-inf"))
    with torch.no_grad():
        assert_same(layer(x, padding=keep, structure=bias())[keep], peer(x, mask)[0][keep])
