"""Read and write safetensors files: named tensors alone, so that no pickle is ever loaded."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from efftrain_cli.foundation.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

Tensors: TypeAlias = "dict[str, Tensor]"
"""Tensors by name, as a state dict."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of named tensors. Those on the CPU are not copied.

    Raises:
        OSError: the disk refused.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(on_host, path)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from None
    # The library gives it the mode of a temporary file: let those read it who can list its folder.
    with contextlib.suppress(PermissionError):  # a disk without modes, or of another owner
        path.chmod(path.parent.stat().st_mode & 0o666)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, on the CPU.

    Raises:
        CheckpointError: it is not a safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from None
