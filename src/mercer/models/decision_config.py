"""What a model of decisions is, as data: the Decision Transformer."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from mercer.models.block_config import BlockConfig, Positive

if TYPE_CHECKING:
    from mercer.core.structures import Structure


class DecisionConfig(BlockConfig):
    """The shape and the parts of a `DecisionTransformer`.

    Raises InvalidArgument, in one sentence that names the fields, for unknown keys and values that do not fit.
    """

    observed: Positive
    """Numbers in an observation, what the paper calls a state."""
    actions: Positive
    """Numbers in an action."""
    bounded: bool = True
    """Predicted actions go through tanh, so that they lie between -1 and 1."""
    max_length: Positive = 4096
    """Steps of the longest episode: the size of the table of steps."""
    position_rows: Positive = 1
    """Rows of a table of which every token gets the first. Models of the hub have a table of positions, and ask it for
    position 0 alone."""
    embedding_norm_eps: Annotated[float, Field(ge=0)] = 1e-5
    """Of the norm on the embeddings."""

    @classmethod
    def sees(cls) -> "Structure":
        from mercer.core.structures import Causal

        return Causal()
