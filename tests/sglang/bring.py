"""Makes the real SGLang importable, and says whether it is there.

SGLang imports torchvision, through the settings of one of its vision models, and there is no
torchvision for a CPU build of torch. An
empty module stands in its place: no image is touched here. transformers is asked first whether
torchvision is there, so that it goes on without. SGLang's own code is as it was published.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from tools.setup_env import sglang_folder


@cache
def bring_sglang() -> bool:
    """Import it once. False where it is not installed."""
    folder = sglang_folder(Path(sys.prefix))
    if folder.is_dir():
        sys.path.append(str(folder))
    if importlib.util.find_spec("sglang") is None:
        return False
    from transformers.utils.import_utils import is_torchvision_available

    if not is_torchvision_available():
        _stand_in_for_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("sglang.srt.mem_cache.unified_radix_cache")
    return True


def _stand_in_for_torchvision() -> None:
    for name in (
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.functional",
        "torchvision.io",
    ):
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    modules: dict[str, Any] = sys.modules
    for name in ("torchvision.transforms", "torchvision.transforms.functional"):
        modules[name].InterpolationMode = types.SimpleNamespace(
            BICUBIC=None, BILINEAR=None, NEAREST=None, LANCZOS=None
        )
    modules["torchvision.io"].decode_jpeg = None
