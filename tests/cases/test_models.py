"""Cases 7, 8 and 17 with a whole language model: prefill and steps, a filled state, left padding."""

import pytest
import torch
from tests.tolerance import assert_close

from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM

ATTENTIONS = ["softmax", "exp-l2", "taylor2-sum", "elu-sum"]
POSITIONS = ["learned", "rotary", "alibi", "sinusoidal", "t5", "none"]
WORK = 64 * 4
"""Products summed along one path through the models here: the width, times the blocks' products."""


def model(attention: str, position: str = "rotary", **more: object) -> DecoderLM:
    config = ModelConfig(
        vocab_size=50,
        dim=16,
        layers=2,
        heads=4,
        kv_heads=2,
        attention=attention,
        position=position,
        max_length=256,
        init_std=0.3,
        seed=3,
        **more,
    )
    return DecoderLM(config).double().eval()


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 7, 8, 63, 64, 65, 127])
@pytest.mark.parametrize("attention", [*ATTENTIONS, ("elu-sum", "softmax")], ids=str)
def test_case_7_prefill_then_one_step(attention: str, length: int):
    """transformers#46190: prefill of T - 1 tokens and one step must give the logits of T tokens."""
    lm, x = model(attention), tokens(2, length)
    full = lm(x)
    _, states = lm(x[:, :-1], return_states=True)
    assert_close(lm(x[:, -1:], states=states), full[:, -1:], length + WORK)


@torch.no_grad()
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_case_8_many_tokens_onto_a_filled_state(attention: str, position: str):
    """transformers PR 45513: the first of 16 tokens given at once equals the one-token decode, and so do the rest."""
    lm, x = model(attention, position), tokens(2, 36)
    _, states = lm(x[:, :20], return_states=True)
    many = lm(x[:, 20:], states=states)
    for t in range(16):
        one, states = lm(x[:, 20 + t : 21 + t], states=states, return_states=True)
        assert_close(many[:, t : t + 1], one, 36 + WORK, f"token {t}")


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_case_17_left_padding(attention: str, position: str, window: int | None):
    """transformers#22161, #31540: 5 left pads and 12 tokens give the logits of the 12 tokens, and so on."""
    if window is not None and attention not in ("softmax", "exp-l2"):
        attention = "taylor2-l2"  # pairs too: a feature state has no window
    lm, x, later = model(attention, position, window=window), tokens(2, 12), tokens(2, 3, seed=1)
    pads = tokens(2, 5, seed=2)
    mask = torch.cat((torch.zeros(2, 5, dtype=torch.bool), torch.ones(2, 12, dtype=torch.bool)), 1)
    alone, states = lm(x, return_states=True)
    padded, after = lm(torch.cat((pads, x), 1), padding=mask, return_states=True)
    assert_close(padded[:, 5:], alone, 17 + WORK)
    assert [s.length.tolist() for s in after] == [[12, 12]] * 2
    for t in range(3):
        expected, states = lm(later[:, t : t + 1], states=states, return_states=True)
        got, after = lm(later[:, t : t + 1], states=after, return_states=True)
        assert_close(got, expected, 17 + WORK, f"step {t}")


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_case_17_rows_of_unequal_length(attention: str):
    """The same reports in float32 and in one batch: each row equals its own unpadded run to 1e-5."""
    lm = model(attention).float()
    lengths = [12, 1, 7]
    rows = [tokens(1, n, seed=n) for n in lengths]
    batch = torch.cat([torch.cat((torch.zeros(1, 12 - x.shape[1], dtype=torch.int64), x), 1) for x in rows])
    mask = torch.arange(12) >= 12 - torch.tensor(lengths).unsqueeze(1)
    out, states = lm(batch, padding=mask, return_states=True)
    step, _ = lm(tokens(3, 1, seed=9), states=states, return_states=True)
    for i, x in enumerate(rows):
        alone, state = lm(x, return_states=True)
        size = float(alone.abs().max())
        assert float((out[i : i + 1, 12 - lengths[i] :] - alone).abs().max()) <= 1e-5 * max(1.0, size)
        after = lm(tokens(3, 1, seed=9)[i : i + 1], states=state)
        assert float((step[i : i + 1] - after).abs().max()) <= 1e-5 * max(1.0, float(after.abs().max()))
