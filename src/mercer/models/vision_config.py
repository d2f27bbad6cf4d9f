"""What an encoder of images is, as data: ViT."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator

from mercer.models.block_config import BlockConfig, Positive


def _as_size(value: Any) -> Any:
    """One number for both sides of a square, or a list, as (height, width)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value, value)
    return tuple(value) if isinstance(value, list) else value


Size = Annotated[tuple[Positive, Positive], BeforeValidator(_as_size)]


class VisionConfig(BlockConfig):
    """The shape and the parts of a `VisionEncoder`.

    Raises InvalidArgument, in one sentence that names the fields, for unknown keys and values that do not fit.
    """

    image: Size = (224, 224)
    """Height and width of an image; one number for both."""
    patch: Size = (16, 16)
    """Height and width of a patch. Rows and columns of pixels that fill no patch are not read."""
    channels: Positive = 3
    """Numbers in a pixel."""
    pool: bool = False
    """A layer tanh(W x + b) on the class token."""
    head: Literal["none", "classes"] = "none"
    """What a call gives: hidden states, or scores of classes."""
    classes: Positive | None = None
    """How many classes there are; needs head "classes"."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.patch[0] > self.image[0] or self.patch[1] > self.image[1]:
            raise ValueError(f"patch {list(self.patch)} is larger than image {list(self.image)}")
        if (self.head == "classes") != (self.classes is not None):
            raise ValueError('classes goes with head "classes"')
        return self

    @property
    def patches(self) -> int:
        """How many patches an image has."""
        return (self.image[0] // self.patch[0]) * (self.image[1] // self.patch[1])
