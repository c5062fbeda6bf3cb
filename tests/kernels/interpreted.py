"""The Triton twins of the codecs' kernels under Triton's interpreter, and arrays as the tensors that they take."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvhold.codecs.base import Codec
from kvhold.core.layout import Group, Layout

NAMES = tuple(f"kvhold.kernels.triton_{name}" for name in ("floats", "rans", "rans_kinds", "quantise", "bins", "groups", "turns"))


@contextmanager
def interpreted(name: str) -> Iterator[ModuleType]:
    """`kvhold.kernels.triton_<name>`, computing in host memory. Only our kernels are interpreted: Triton itself was imported before."""
    with pytest.MonkeyPatch.context() as patch:
        for each in NAMES:
            patch.delitem(sys.modules, each, raising=False)
        patch.setenv("TRITON_INTERPRET", "1")
        module = import_module(f"kvhold.kernels.triton_{name}")
        for each in NAMES:
            sys.modules.pop(each, None)
    yield module


def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A copy, so that nothing is shared with what is compared later."""
    return torch.from_numpy(np.ascontiguousarray(array).copy())


def standing_in(host: ModuleType, twin: ModuleType, names: list[str]) -> SimpleNamespace:
    """A module for a codec: `host` with these functions replaced by `twin`'s, each behind copies to tensors and back."""
    return SimpleNamespace(**{**vars(host), **{name: _of_arrays(getattr(twin, name)) for name in names}})


def of_a_layer(codec: Codec, plain: bytes, group: Group, num_tokens: int) -> tuple[bytes, bytes]:
    """What the codec writes of a layer, and what it reads from that."""
    place: dict[str, Any] = {
        "layout": Layout(groups=(group,), tokens_per_chunk=num_tokens),
        "group": 0,
        "layer": 0,
        "num_tokens": num_tokens,
    }
    encoded, decoded = bytearray(codec.max_size(place["layout"], 0, num_tokens)), bytearray(len(plain))
    end = codec.encode(memoryview(plain), memoryview(encoded), **place)
    codec.decode(memoryview(encoded)[:end], memoryview(decoded), **place)
    return bytes(encoded[:end]), bytes(decoded)


def _of_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        given = [_to_tensors(each) for each in arguments]
        given_named = {name: _to_tensors(each) for name, each in named.items()}
        result = function(*given, **given_named)
        for array, filled in zip((*arguments, *named.values()), (*given, *given_named.values()), strict=True):
            if isinstance(array, np.ndarray) and array.flags.writeable:
                array[:] = filled.numpy()
        return _to_arrays(result)

    return call


def _to_tensors(value: Any) -> Any:
    if isinstance(value, list):
        return [tensor(each) for each in value]
    return tensor(value) if isinstance(value, np.ndarray) else value


def _to_arrays(value: Any) -> Any:
    if isinstance(value, tuple):
        arrays = [each.numpy() for each in value]
        return type(value)(*arrays) if hasattr(value, "_fields") else tuple(arrays)
    return value.numpy() if isinstance(value, torch.Tensor) else value
