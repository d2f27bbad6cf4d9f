"""Writing that survives a crash: new content is complete and on the disk before it takes the old content's name.

A file is written under a temporary name beside its target, flushed to the disk and renamed; a folder likewise. A reader
therefore sees the old version or the new one and never half of either, whatever the moment of a kill or a power cut.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mercer.errors import StorageError

TEMPORARY = ".partial"
_FULL = {errno.ENOSPC, errno.EDQUOT}


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_error(error: Exception, target: Path, intact: str = "") -> StorageError:
    """One sentence for a failed write: the cause, the target, and what is still intact.

    safetensors reports the system's error number only inside its text, so it is read from there.
    """
    number = getattr(error, "errno", None)
    if number is None and (found := re.search(r"os error (\d+)", str(error))):
        number = int(found.group(1))
    if number in _FULL:
        cause = "the disk is full"
    elif number == errno.EFBIG:
        cause = "the file would exceed the size limit of this process or file system"
    elif number is not None:
        cause = os.strerror(number).lower()
    else:
        cause = str(error)
    return StorageError(f"cannot write {target}: {cause}{'; ' + intact if intact else ''}")


@contextmanager
def new_folder(target: Path, intact: str = "") -> Iterator[Path]:
    """Yield a temporary folder that becomes ``target`` when the block ends well, and vanishes when it does not.

    An existing ``target`` is replaced. ``intact`` is added to the sentence of a failed write.

    Raises:
        StorageError: a write inside the block failed, for example on a full disk.
    """
    temporary = target.with_name(target.name + TEMPORARY)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        for path in sorted(temporary.rglob("*")):
            sync(path)
        sync(temporary)
        if target.exists():  # rename cannot replace a folder with content; readers never look at names with this suffix
            old = target.with_name(target.name + ".old" + TEMPORARY)
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
            temporary.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            temporary.rename(target)
        sync(target.parent)
    except Exception as error:
        if isinstance(error, StorageError) or not (isinstance(error, OSError) or "os error" in str(error)):
            raise
        raise storage_error(error, target, intact) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_file(target: Path, content: str | bytes, intact: str = "") -> None:
    """Replace ``target`` by ``content`` (text as UTF-8) in one step.

    Raises:
        StorageError: the write failed; the old file is as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = target.with_name(target.name + TEMPORARY)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        sync(target.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(error, target, intact) from error


def write_json(target: Path, content: Any) -> None:
    """Replace ``target`` by ``content`` as indented JSON in one step; NaN and infinity are refused."""
    write_file(target, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        StorageError: the file is missing, unreadable or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    except ValueError as error:
        raise StorageError(f"cannot read {path}: it is not valid JSON ({error})") from error
    except RecursionError as error:
        raise StorageError(f"cannot read {path}: its JSON is nested too deeply") from error
