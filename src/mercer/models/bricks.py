"""From a block's configuration to its bricks: what every family of models is wired from."""

from importlib import import_module

from mercer.core.names import parse_attention
from mercer.core.structures import Structure
from mercer.mixers.base import Mixer
from mercer.mixers.block import MixerBlock
from mercer.mixers.names import CHANNEL_MIXING, mixer_config
from mercer.models.block_config import BlockConfig
from mercer.models.config import ModelConfig
from mercer.models.initial import generator_of
from mercer.nn.attention import Attention
from mercer.nn.block import Block
from mercer.nn.cross_attention import CrossAttention
from mercer.nn.experts import Experts
from mercer.nn.feedforward import FeedForward
from mercer.nn.norms import LayerNorm, RMSNorm
from mercer.nn.options import takes_gain
from mercer.nn.rotary import Rotary

ATTENTION_PARTS = ("qkv", "query", "key", "value", "output", "gate")


def make_norm(config: BlockConfig, dim: int | None = None) -> LayerNorm | RMSNorm:
    """A norm of the residual stream, or of another number of channels."""
    dim = config.dim if dim is None else dim
    if config.norm == "rms":
        return RMSNorm(dim, eps=config.norm_eps, offset=config.norm_offset)
    return LayerNorm(dim, eps=config.norm_eps, bias="norm" in config.biased)


def make_attention(
    config: BlockConfig,
    layer: int,
    structure: Structure,
    *,
    rotary: Rotary | None = None,
    alibi: bool = False,
    recency: bool = False,
    name: str = "blocks",
    width: int | None = None,
) -> Attention:
    """The attention of a layer. name: of the list of blocks, which tells the random features of two lists apart. width:
    channels that it reads, where they are not those of the residual stream."""
    kernel, normalizer = parse_attention(config.attentions[layer])
    return Attention(
        config.dim if width is None else width,
        config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        output_dim=config.dim,
        kernel=kernel,
        normalizer=normalizer,
        structure=structure,
        scale=config.attention_scale,
        rotary=rotary,
        alibi=alibi,
        gain=config.gain if takes_gain(normalizer) else "none",
        gain_init=1.0 if config.gain_init is None else config.gain_init,
        recency=recency,
        bias=tuple(part for part in config.biased if part in ATTENTION_PARTS),
        generator=generator_of(config.seed, f"{name}.{layer}.attention.kernel_tensors"),
    )


def make_cross_attention(config: BlockConfig, layer: int, *, name: str = "blocks") -> CrossAttention:
    """The attention of a decoder's layer to a memory, with the kernel of that layer."""
    kernel, normalizer = parse_attention(config.attentions[layer])
    return CrossAttention(
        config.dim,
        config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        kernel=kernel,
        normalizer=normalizer,
        scale=config.attention_scale,
        gain=config.gain if takes_gain(normalizer) else "none",
        gain_init=1.0 if config.gain_init is None else config.gain_init,
        bias=tuple(part for part in config.biased if part in ATTENTION_PARTS),
        generator=generator_of(config.seed, f"{name}.{layer}.cross.kernel_tensors"),
    )


def make_feedforward(config: BlockConfig, layer: int) -> FeedForward | Experts:
    """The feed-forward of a layer, or its experts."""
    experts = config.experts
    if experts is not None and experts.at(layer):
        return Experts(
            config.dim,
            config.hidden,
            experts.count,
            experts.chosen,
            kind=config.feedforward,
            renormalise=experts.renormalise,
            capacity=experts.capacity,
            router_bias=experts.router_bias,
        )
    return FeedForward(config.dim, config.hidden, kind=config.feedforward, bias="feedforward" in config.biased)


def make_mixer_block(config: ModelConfig, layer: int) -> MixerBlock:
    """The block of a layer that a mixer's name stands for, with the feed-forward that the configuration has."""
    name = config.attentions[layer]
    options = mixer_config(name, config.mixers.get(name))
    feedforward: FeedForward | Experts | Mixer | None = None
    if config.feedforward in CHANNEL_MIXING:
        home, kind = CHANNEL_MIXING[config.feedforward]
        made = getattr(import_module(f"mercer.mixers.{home}"), kind)
        feedforward = made(config.dim, config.hidden, layer=layer, layers=config.layers)
    elif config.feedforward != "none":
        feedforward = make_feedforward(config, layer)
    return MixerBlock(
        options.build(config.dim, config.heads, layer=layer, layers=config.layers),
        make_norm(config),
        feedforward,
        None if feedforward is None else make_norm(config),
    )


def make_block(config: BlockConfig, layer: int, attention: Attention) -> Block:
    """A block around an attention, with its norms where the configuration has them."""
    both = config.norm_position == "both"
    return Block(
        attention,
        make_feedforward(config, layer),
        make_norm(config),
        None if config.parallel == "one_norm" else make_norm(config),
        norm_position=config.norm_position,
        parallel=config.parallel,
        attention_norm_after=make_norm(config) if both else None,
        feedforward_norm_after=make_norm(config) if both else None,
    )
