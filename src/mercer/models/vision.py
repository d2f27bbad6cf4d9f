"""Encoders of images: an image as a sequence of patches, each of which sees every other."""

import torch
from torch import Tensor, nn

from mercer.core.structures import Full
from mercer.errors import InvalidArgument
from mercer.models.bricks import make_attention, make_block, make_norm
from mercer.models.configured import ConfiguredModel
from mercer.models.heads import Pooler
from mercer.models.initial import initialise
from mercer.models.vision_config import VisionConfig
from mercer.nn.positions import LearnedPositions


class Patches(nn.Linear):
    """W p + b for each patch p, its pixels channel by channel and row by row: a convolution whose stride is its width
    (Dosovitskiy et al. 2021).
    """

    def __init__(self, channels: int, patch: tuple[int, int], dim: int) -> None:
        super().__init__(channels * patch[0] * patch[1], dim)
        self.patch = patch

    def forward(self, images: Tensor) -> Tensor:
        """images: [B, channels, H, W]; returns [B, patches, dim], row by row."""
        pixels = nn.functional.unfold(images, self.patch, stride=self.patch)
        return super().forward(pixels.transpose(1, 2))


class VisionEncoder(ConfiguredModel):
    """An encoder of images that a `VisionConfig` describes (ViT, Dosovitskiy et al. 2021, arXiv 2010.11929).

    x_0 = [class token, patches] + positions;  x_l = block_l(x_{l-1}), with a final norm where blocks have theirs before
    their parts. A call gives x_L, or scores of classes from its first token, as `config.head` says.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # torch's default draws are replaced below; leave the caller's stream
            self.patches = Patches(config.channels, config.patch, config.dim)
            self.class_token = nn.Parameter(torch.zeros(config.dim))
            self.positions = LearnedPositions(1 + config.patches, config.dim)
            self.blocks = nn.ModuleList(
                make_block(config, layer, make_attention(config, layer, Full())) for layer in range(config.layers)
            )
            self.norm = nn.Identity() if config.norm_position == "post" else make_norm(config)
            self.pooler = Pooler(config.dim) if config.pool else None
            self.classes = nn.Linear(config.dim, config.classes) if config.classes else None
        initialise(self, std=config.init_std, seed=config.seed, residual_outputs=2 * config.layers)

    def hidden(self, images: Tensor) -> Tensor:
        """The last hidden states [B, 1 + patches, dim], of the class token first; images as in `forward`."""
        wanted = (self.config.channels, *self.config.image)
        if images.dim() != 4 or tuple(images.shape[1:]) != wanted or not images.is_floating_point():
            raise InvalidArgument(
                f"the model takes images [B, {', '.join(map(str, wanted))}] of floating-point numbers, for which it "
                f"has positions; got {images.dtype} of {list(images.shape)}; resize them"
            )
        x = torch.cat((self.class_token.expand(len(images), 1, -1), self.patches(images)), 1) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, images: Tensor) -> Tensor:
        """Hidden states [B, 1 + patches, dim], or scores of classes [B, classes].

        images: [B, channels, height, width] of the size in the configuration, normalised as in training.
        """
        x = self.hidden(images)
        if self.classes is None:
            return x
        return self.classes(x[:, 0] if self.pooler is None else self.pooler(x))
