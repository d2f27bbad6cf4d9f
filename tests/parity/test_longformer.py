"""LongformerAttention against the layer of `transformers`, weight for weight, gradients too."""

import pytest
import torch

from mercer.nn import LongformerAttention

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

DIM, HEADS, WINDOW, LENGTH = 24, 3, 8, 32
GLOBALS = {
    "none": [[], []],
    "first": [[0], [0]],
    "several": [[0, 1, 17], [3, 9, 20]],
    "uneven": [[0, 5, 6, 30], [12]],
    "in one row": [[], [2, 7]],
}


def pair(dtype=torch.float64):
    """Their layer, drawn again, and ours with its weights; the output projection, which they keep elsewhere, does
    nothing.
    """
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = transformers.LongformerConfig(
        hidden_size=DIM, num_attention_heads=HEADS, attention_window=[WINDOW], attention_probs_dropout_prob=0.0
    )
    theirs = LongformerSelfAttention(config, 0).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    ours = LongformerAttention(DIM, HEADS, window=WINDOW).to(dtype)
    unused = {"output.weight": torch.eye(DIM, dtype=dtype), "output.bias": torch.zeros(DIM, dtype=dtype)}
    ours.load_state_dict({**theirs.state_dict(), **unused})
    return theirs, ours


def masks(name, padded):
    chosen = torch.zeros(2, LENGTH, dtype=torch.bool)
    for row, tokens in enumerate(GLOBALS[name]):
        chosen[row, tokens] = True
    there = torch.ones_like(chosen)
    if padded:
        there[0, 31:] = there[1, 21:] = False
    return chosen & there, there


def their_rows(layer, x, chosen, there):
    code = torch.where(there, 0.0, -10000.0).masked_fill(chosen, 10000.0).to(x.dtype)
    return layer(
        x,
        attention_mask=code,
        is_index_masked=~there,
        is_index_global_attn=chosen,
        is_global_attn=bool(chosen.any()),
    )[0]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", GLOBALS)
def test_forward_and_gradients_equal_theirs(name, padded):
    # Their softmax is computed in float32 whatever the inputs are. Where a row of padding sees padding alone, the
    # lowest float64 becomes an infinity there, and the gradient not a number: so float32 with padding.
    dtype = torch.float32 if padded else torch.float64
    theirs, ours = pair(dtype)
    chosen, there = masks(name, padded)
    x = torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(1), dtype=dtype)
    upstream = torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(2), dtype=dtype)
    upstream = upstream * there.unsqueeze(-1)  # rows of padding are theirs to fill
    found = {}
    for layer, rows in (
        (theirs, lambda x: their_rows(theirs, x, chosen, there)),
        (ours, lambda x: ours(x, global_mask=chosen, padding=there if padded else None)),
    ):
        leaf = x.clone().requires_grad_()
        out = rows(leaf)
        names = [name for name, _ in theirs.named_parameters()]
        parameters = [dict(layer.named_parameters())[name] for name in names]
        slopes = torch.autograd.grad((out * upstream).sum(), [leaf, *parameters], allow_unused=True)
        filled = [torch.zeros(()) if slope is None else slope for slope in slopes]
        found[layer] = [out * there.unsqueeze(-1), *filled]
    whats = ["rows", "x", *names]
    largest = dict(zip(whats, (float(x.detach().abs().max()) for x in found[theirs]), strict=True))
    for what, expected, actual in zip(whats, found[theirs], found[ours], strict=True):
        # The gradient of a key's bias is 0 by cancellation: it has the error of its terms, as that of the weight.
        error = (actual - expected).abs().max() / max(1, largest[what], largest.get(what.replace("bias", "weight"), 0))
        assert error < 1e-5, f"{what}: {error:.1e}"


def test_a_longer_model_of_theirs_agrees_through_its_own_padding():
    """LongformerModel pads to a multiple of the window and codes the masks itself; one layer, embeddings and all."""
    config = transformers.LongformerConfig(
        vocab_size=50,
        hidden_size=DIM,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=32,
        max_position_embeddings=64,
        attention_window=WINDOW,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=1,
    )
    model = transformers.LongformerModel(config, add_pooling_layer=False).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    tokens = torch.randint(2, 50, (2, 29), generator=generator)
    there = torch.ones(2, 29, dtype=torch.bool)
    there[1, 20:] = False
    chosen = torch.zeros_like(there)
    chosen[:, 0] = chosen[0, 9] = True
    with torch.no_grad():
        expected = model(tokens, attention_mask=there.long(), global_attention_mask=chosen.long()).last_hidden_state
        embedded = model.embeddings(input_ids=tokens)
        layer = model.encoder.layer[0]
        ours = LongformerAttention(DIM, HEADS, window=WINDOW)
        weights = layer.attention.self.state_dict()
        weights |= {f"output.{n}": t for n, t in layer.attention.output.dense.state_dict().items()}
        ours.load_state_dict(weights)
        mixed = layer.attention.output.LayerNorm(ours(embedded, global_mask=chosen, padding=there) + embedded)
        actual = layer.output(layer.intermediate(mixed), mixed)
    error = (actual - expected)[there].abs().max()
    assert error < 1e-5, f"{error:.1e}"
