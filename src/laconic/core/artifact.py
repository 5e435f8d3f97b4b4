"""Every file on disk: errors with their exit codes, strict JSON, the safetensors header check, commits, and single-file artifacts."""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

HEADER_BYTES = 100_000_000  # largest safetensors header and largest JSON file that is read
JSON_DEPTH = 64
JSON_INTEGER = 2**53
ROOM = 2.2  # free space asked for, in expected bytes
FORMAT = 1  # of single-file artifacts; newer ones are refused

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32,
    "U32": torch.uint32, "F32": torch.float32, "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64,
    "C64": torch.complex64,
}  # fmt: skip


class LaconicError(Exception):
    """One line that says what was asked, what there was, what to do; `code` is the exit code of the command line."""

    code: int = 70


class Usage(LaconicError):
    """A setting, a flag or a recipe that cannot be meant."""

    code = 2


class NonFinite(LaconicError):
    """NaN or infinity where numbers are asked."""

    code = 65


class BadInput(LaconicError):
    """An input that is missing or bad: data, model, tokenizer."""

    code = 66


class Busy(LaconicError):
    """The directory is held by somebody else, or the target exists."""

    code = 73


class NoSpace(LaconicError):
    """The file system refused: full, failing, or not permitted."""

    code = 74


class Damaged(LaconicError):
    """An artifact of ours that fails its check, belongs to another model, or is too new."""

    code = 76


class Unsafe(LaconicError):
    """Refused for safety: a pickle, a path that leaves its folder."""

    code = 77
