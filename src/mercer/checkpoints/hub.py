"""Models by their name on the Hugging Face hub, kept in its local cache."""

from __future__ import annotations

import re
from pathlib import Path

from mercer.errors import InvalidArgument, StorageError, Unsupported

FILES = ("*.json", "*.safetensors", "*.jinja")
"""What is fetched: configuration, tokenizer, templates and weights, never a format that runs code."""
NOT_FETCHED = ("consolidated*", "original/*")
"""The same weights once more, in the layouts of Mistral and Meta."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def find_folder(path: str | Path) -> Path:
    """The folder or file of a path; or, where there is none and the path reads owner/name or owner/name@revision, the
    folder of the hub's local cache, fetched first if the network allows it.

    Raises:
        InvalidArgument: there is no such path, and it is no name of the hub.
        StorageError: the hub has no such model, or cannot be reached.
        Unsupported: the extra hub is not installed.
    """
    try:
        if Path(path).exists():
            return Path(path)
    except OSError as error:  # no path of this system
        raise InvalidArgument(f"there is no folder or file {path}: {error.strerror}") from error
    if _NAME.fullmatch(str(path)) is None:
        raise InvalidArgument(f"there is no folder or file {path}")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"there is no folder {path}; to fetch a model of that name the extra hub is needed: "
            "pip install 'mercer[hub]'"
        ) from error
    name, _, revision = str(path).partition("@")
    try:
        return Path(
            snapshot_download(
                name, revision=revision or None, allow_patterns=list(FILES), ignore_patterns=list(NOT_FETCHED)
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise StorageError(
            f"there is no folder {path}, and the hub, which may be out of reach, gave no such model: {reason}"
        ) from error
