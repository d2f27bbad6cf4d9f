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


@pytest.mark.parametrize("position", ["pre", "post"])
def test_states_and_padding_pass_through(position):
    layer, x = block(position), torch.randn(1, 6, 8)
    keep = torch.tensor([[0, 1, 1, 0, 1, 1]], dtype=torch.bool)
    alone = layer(x[keep][None])
    first, state = layer(x[:, :3], padding=keep[:, :3], return_state=True)
    second, state = layer(x[:, 3:], padding=keep[:, 3:], state=state, return_state=True)
    torch.testing.assert_close(torch.cat((first, second), 1)[keep][None], alone)
    assert state.length.item() == 4
    with pytest.raises(InvalidArgument, match="pre"):
        block("middle")
