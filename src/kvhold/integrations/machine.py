"""Only facts that change the last bits of KV."""

import os
import platform
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from kvhold.core.naming import Table

_INSTRUCTIONS = (
    "avx",
    "amx",
    "fma",
    "f16c",
    "sse4",
    "bf16",
    "fp16",
    "asimd",
    "sve",
    "sme",
    "i8mm",
    "vnni",
)
_PREFIXES = (
    "ATEN_",
    "CUBLAS_",
    "CUDNN_",
    "DNNL_",
    "FLASHINFER_",
    "HIPBLASLT_",
    "MKL_",
    "NVTE_",
    "ONEDNN_",
    "ROCBLAS_",
    "TORCHINDUCTOR_",
)
_OTHERS = Table.of(
    "NCCL_ALGO NCCL_PROTO NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE "
    "TORCH_BLAS_PREFER_CUBLASLT"
).named

HARMLESS = Table.of(
    harmless={
        "where a file is": "FLASHINFER_WORKSPACE_BASE FLASHINFER_CUBIN_DIR TORCHINDUCTOR_CACHE_DIR",
        "threads divide rows and heads, not sums": "MKL_NUM_THREADS MKL_DYNAMIC",
        "how code is compiled, not what it computes": "TORCHINDUCTOR_COMPILE_THREADS "
        "TORCHINDUCTOR_FX_GRAPH_CACHE"
        " TORCHINDUCTOR_AUTOGRAD_CACHE",
        "what is logged": "DNNL_VERBOSE ONEDNN_VERBOSE MKL_VERBOSE FLASHINFER_LOGGING_LEVEL",
    }
).harmless
"""Variables of libraries that are not named, each with the reason."""


@lru_cache(maxsize=1)
def processor_facts() -> Mapping[str, str]:
    maker, flags = "", ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, text = (part.strip() for part in line.partition(":"))
            if name in ("vendor_id", "CPU implementer"):
                maker = text
            if name in ("flags", "Features"):
                flags = " ".join(
                    sorted(
                        flag for flag in text.split() if any(word in flag for word in _INSTRUCTIONS)
                    )
                )
                break
    except OSError:
        pass
    return {
        "cpu.machine": repr(platform.machine()),
        "cpu.maker": repr(maker),
        "cpu.instructions": repr(flags),
        "cpu.torch": repr(torch.backends.cpu.get_cpu_capability()),
    }


@lru_cache(maxsize=8)
def version_facts(*names: str) -> Mapping[str, str]:
    found = {}
    for name in names:
        try:
            found[f"versions.{name}"] = repr(version(name))
        except PackageNotFoundError:
            continue
    return found


def device_facts(device: str) -> dict[str, str]:
    """A GPU's model and software; empty for a CPU. device: torch's name"""
    try:
        place = torch.device(device)
    except RuntimeError:
        return {}
    if place.type in ("cpu", "meta"):
        return {}
    module = torch.get_device_module(place)
    name = getattr(module, "get_device_name", lambda place: place.type)
    capability = getattr(module, "get_device_capability", lambda place: None)
    return {
        "device.name": repr(str(name(place))),
        "device.capability": repr(str(capability(place))),
        "versions.cuda": repr(str(torch.version.cuda)),
        "versions.hip": repr(str(torch.version.hip)),
    }


def library_facts(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    environ = os.environ if environ is None else environ
    return {
        f"environment.{name}": repr(environ[name]) for name in sorted(environ) if _is_named(name)
    }


def _is_named(name: str) -> bool:
    return name not in HARMLESS and (name in _OTHERS or name.startswith(_PREFIXES))
