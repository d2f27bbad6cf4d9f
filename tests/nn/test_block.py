import pytest
import torch

from mercer.errors import InvalidArgument
from mercer.nn import Attention, Block, FeedForward, LayerNorm, RMSNorm


def block(position, norm=RMSNorm):
    return Block(Attention(8, 2), FeedForward(8), norm(8), norm(8), norm_position=position)


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_norms_stand_before_or_after(norm):
    x = torch.randn(2, 5, 8)
    pre = block("pre", norm)
    middle = x + pre.attention(pre.attention_norm(x))
    torch.testing.assert_close(pre(x), middle + pre.feedforward(pre.feedforward_norm(middle)))
    post = block("post", norm)
    middle = post.attention_norm(x + post.attention(x))
    torch.testing.assert_close(post(x), post.feedforward_norm(middle + post.feedforward(middle)))


def norms(count, norm=RMSNorm):
    """Norms that differ, so that one in another's place is seen."""
    made = [norm(8) for _ in range(count)]
    for each in made:
        torch.nn.init.normal_(each.weight)
    return made


def test_norms_stand_before_and_after():
    before, between, after, last = norms(4)
    parts = Attention(8, 2), FeedForward(8)
    layer = Block(
        *parts, before, between, norm_position="both", attention_norm_after=after, feedforward_norm_after=last
    )
    x = torch.randn(2, 5, 8)
    middle = x + after(parts[0](before(x)))
    torch.testing.assert_close(layer(x), middle + last(parts[1](between(middle))))
    assert len({name.split(".")[0] for name in layer.state_dict()}) == 6


def test_parallel_parts_read_the_same_stream():
    first, second = norms(2, LayerNorm)
    parts, x = (Attention(8, 2), FeedForward(8)), torch.randn(2, 5, 8)
    own = Block(*parts, first, second, parallel="own_norms")
    torch.testing.assert_close(own(x), x + parts[0](first(x)) + parts[1](second(x)))
    one = Block(*parts, first, None, parallel="one_norm")
    torch.testing.assert_close(one(x), x + parts[0](first(x)) + parts[1](first(x)))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"norm_position": "both"}, "both given"),
        ({"attention_norm_after": RMSNorm(8)}, "neither of them"),
        ({"norm_position": "both", "attention_norm_after": RMSNorm(8)}, "both given"),
        ({"parallel": "both"}, "none, own_norms, one_norm"),
        ({"parallel": "own_norms", "norm_position": "post"}, '"pre"'),
        ({"parallel": "one_norm"}, "feedforward_norm"),
        ({"feedforward_norm": None}, "feedforward_norm"),
    ],
)
def test_norms_that_a_block_has_no_place_for_are_refused(arguments, sentence):
    given = {"attention_norm": RMSNorm(8), "feedforward_norm": RMSNorm(8)} | arguments
    with pytest.raises(InvalidArgument, match=sentence):
        Block(Attention(8, 2), FeedForward(8), **given)


def arranged(how):
    if how in ("pre", "post"):
        return block(how)
    if how == "both":
        given = dict(zip(("attention_norm_after", "feedforward_norm_after"), norms(2), strict=True))
        return Block(Attention(8, 2), FeedForward(8), *norms(2), norm_position="both", **given)
    return Block(
        Attention(8, 2), FeedForward(8), *(norms(2) if how == "own_norms" else (*norms(1), None)), parallel=how
    )


@pytest.mark.parametrize("how", ["pre", "post", "both", "own_norms", "one_norm"])
def test_states_and_padding_pass_through(how):
    layer, x = arranged(how), torch.randn(1, 6, 8)
    keep = torch.tensor([[0, 1, 1, 0, 1, 1]], dtype=torch.bool)
    alone = layer(x[keep][None])
    first, state = layer(x[:, :3], padding=keep[:, :3], return_state=True)
    second, state = layer(x[:, 3:], padding=keep[:, 3:], state=state, return_state=True)
    torch.testing.assert_close(torch.cat((first, second), 1)[keep][None], alone)
    assert state.length.item() == 4
    with pytest.raises(InvalidArgument, match="pre"):
        block("middle")
