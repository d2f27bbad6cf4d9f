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
    "uneven": [[0, 5, 6, 30], [12, 27]],
    "in one row": [[], [2, 7]],
}


def pair():
    """Their layer, drawn again, and ours with its weights; the output projection, which they keep elsewhere, does
    nothing.
    """
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = transformers.LongformerConfig(
        hidden_size=DIM, num_attention_heads=HEADS, attention_window=[WINDOW], attention_probs_dropout_prob=0.0
    )
    theirs = LongformerSelfAttention(config, 0).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    ours = LongformerAttention(DIM, HEADS, window=WINDOW).double()
    unused = {"output.weight": torch.eye(DIM), "output.bias": torch.zeros(DIM)}
    ours.load_state_dict({**theirs.state_dict(), **unused})
    return theirs, ours


def masks(name, padded):
    chosen = torch.zeros(2, LENGTH, dtype=torch.bool)
    for row, tokens in enumerate(GLOBALS[name]):
        chosen[row, tokens] = True
    there = torch.ones_like(chosen)
    if padded:
        there[1, 24:] = False
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


def gradients(layer, out, x):
    """Of the leaf and of each of their parameters, by name."""
    leaves = {"x": x} | {name: p for name, p in layer.named_parameters() if not name.startswith("output")}
    slopes = torch.autograd.grad(out, list(leaves.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(leaves.items(), slopes, strict=True)}


def drawn(seed):
    return torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", GLOBALS)
def test_forward_and_gradients_equal_theirs(name, padded):
    theirs, ours = pair()  # whose softmax is computed in float32 whatever the inputs are
    chosen, there = masks(name, padded)
    x, upstream = drawn(1).requires_grad_(), drawn(2) * there.unsqueeze(-1)  # rows of padding are theirs to fill
    actual = ours(x, global_mask=chosen, padding=there if padded else None)
    expected = their_rows(theirs, x, chosen, there)
    assert ((actual - expected)[there].abs().max() / expected.abs().max()) < 1e-5
    # Their gradients under padding may be none (not a number), so those of each row alone are taken.
    alone = x.new_zeros(())
    for row in range(2):
        real = slice(0, int(there[row].sum())), slice(row, row + 1)
        part = their_rows(theirs, x[real[1], real[0]], chosen[real[1], real[0]], there[real[1], real[0]])
        alone = alone + (part * upstream[real[1], real[0]]).sum()
    wanted, found = gradients(theirs, alone, x), gradients(ours, (actual * upstream).sum(), x)
    assert wanted.keys() == found.keys()
    for what, slope in wanted.items():
        # That of a key's bias is 0 by cancellation: it has the error of its terms, as that of the weight.
        largest = max(1, float(slope.abs().max()), float(wanted[what.replace("bias", "weight")].abs().max()))
        error = float((found[what] - slope).abs().max()) / largest
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
