"""Bricks of a model: attention, positions, norms, feed-forward, residual block and a blockwise loss."""

from mercer.nn.attention import Attention
from mercer.nn.block import Block
from mercer.nn.feedforward import FeedForward
from mercer.nn.loss import linear_cross_entropy
from mercer.nn.norms import LayerNorm, RMSNorm
from mercer.nn.positions import LearnedPositions, Sinusoidal, alibi_slopes
from mercer.nn.rotary import Rotary

__all__ = [
    "Attention",
    "Block",
    "FeedForward",
    "LayerNorm",
    "LearnedPositions",
    "RMSNorm",
    "Rotary",
    "Sinusoidal",
    "alibi_slopes",
    "linear_cross_entropy",
]
