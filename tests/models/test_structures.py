"""Models with a structure by name: who sees whom, as the gradients of the logits tell it."""

import pytest
import torch

from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM

LENGTH = 19


def influence(config: ModelConfig) -> torch.Tensor:
    """Whether the logits at one place change with the token at another, [place, token], found by changing it."""
    model = DecoderLM(config).double().eval()
    tokens = torch.randint(0, config.vocab_size, (1, LENGTH))
    with torch.no_grad():
        before = model(tokens)
        rows = []
        for place in range(LENGTH):
            other = tokens.clone()
            other[0, place] = (other[0, place] + 1) % config.vocab_size
            rows.append((model(other) != before).any(-1)[0])
    return torch.stack(rows, 1)


@pytest.mark.parametrize(
    ("values", "sees"),
    [
        ({}, lambda i, j: j <= i),
        ({"structure": "window(4)"}, lambda i, j: 0 <= i - j < 4),
        ({"structure": "strided(5)"}, lambda i, j: j <= i and (i - j < 5 or (i - j) % 5 == 0)),
        ({"structure": "strided(5)", "window": 8}, lambda i, j: 0 <= i - j < 8 and (i - j < 5 or (i - j) % 5 == 0)),
        ({"structure": "fixed(4, 2)"}, lambda i, j: j <= i and (i // 4 == j // 4 or j % 4 >= 2)),
        ({"structure": "longformer(4, first=1)"}, lambda i, j: j <= i and (i - j <= 2 or j == 0)),
        ({"structure": "window(2) | global(at=[3])"}, lambda i, j: j <= i and (i - j < 2 or j == 3 or i == 3)),
        ({"structure": "blocks(4, before=1)"}, lambda i, j: j <= i and i // 4 - j // 4 <= 1),
        ({"structure": "bigbird(3, random=0)"},
         lambda i, j: j <= i and (i // 3 - j // 3 <= 1 or j < 3 or i // 3 == (LENGTH - 1) // 3)),
        ({"structure": "bigbird(3, random=0, causal=true)"}, lambda i, j: j <= i and (i // 3 - j // 3 <= 1 or j < 3)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("attention", ["softmax", "taylor2-l2"])
def test_a_token_changes_what_sees_it_and_nothing_else(values, sees, attention):
    config = ModelConfig(vocab_size=9, dim=16, layers=1, heads=2, init_std=0.5, attention=attention, **values)
    expected = torch.tensor([[sees(i, j) or i == j for j in range(LENGTH)] for i in range(LENGTH)])
    assert (influence(config) == expected).all()


def test_a_pattern_over_the_layers_widens_what_is_seen():
    config = ModelConfig(vocab_size=9, dim=16, layers=2, heads=2, init_std=0.5, structure=["window(2)", "strided(6)"])
    near = torch.tensor([[0 <= i - j < 2 for j in range(LENGTH)] for i in range(LENGTH)]).double()
    far = torch.tensor([[i >= j and (i - j < 6 or (i - j) % 6 == 0) for j in range(LENGTH)] for i in range(LENGTH)])
    assert (influence(config) == (far.double() @ near > 0)).all()


def test_all_names_of_one_pattern_are_one_model():
    tokens = torch.randint(0, 9, (2, LENGTH))
    common = {"vocab_size": 9, "dim": 16, "layers": 2, "heads": 2, "init_std": 0.5}
    first, *others = (
        DecoderLM(ModelConfig(**common, **values))(tokens)
        for values in (
            {"window": 4},
            {"structure": "window(4)"},
            {"structure": "causal & window(4)"},
            {"structure": "window(7) & (window(4) | window(2))"},
            {"structure": "longformer(6)"},
        )
    )
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-5)
