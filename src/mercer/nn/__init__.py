"""Bricks of a model: attention to oneself and to a memory, positions, norms, feed-forward, experts, residual block and
a blockwise loss.
"""

from mercer.nn.attention import Attention
from mercer.nn.block import Block
from mercer.nn.cross_attention import CrossAttention
from mercer.nn.evoformer import TriangleAttention, TriangleMultiplication
from mercer.nn.experts import Experts
from mercer.nn.feedforward import FeedForward
from mercer.nn.longformer import LongformerAttention
from mercer.nn.loss import linear_cross_entropy
from mercer.nn.norms import LayerNorm, RMSNorm
from mercer.nn.positions import LearnedPositions, Sinusoidal, alibi_slopes
from mercer.nn.rope_bands import Llama3, LongRoPE, YaRN
from mercer.nn.rope_config import rope_from_config
from mercer.nn.rope_scaling import NTK, DynamicNTK, LinearScaling, Proportional
from mercer.nn.rotary import Rotary
from mercer.nn.routing import Routing, balance_loss, z_loss
from mercer.nn.t5 import T5Bias

__all__ = [
    "NTK",
    "Attention",
    "Block",
    "CrossAttention",
    "DynamicNTK",
    "Experts",
    "FeedForward",
    "LayerNorm",
    "LearnedPositions",
    "LinearScaling",
    "Llama3",
    "LongRoPE",
    "LongformerAttention",
    "Proportional",
    "RMSNorm",
    "Rotary",
    "Routing",
    "Sinusoidal",
    "T5Bias",
    "TriangleAttention",
    "TriangleMultiplication",
    "YaRN",
    "alibi_slopes",
    "balance_loss",
    "linear_cross_entropy",
    "rope_from_config",
    "z_loss",
]
