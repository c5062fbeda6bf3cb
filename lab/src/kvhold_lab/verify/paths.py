from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvhold_lab.verify.messages import Started

ITSELF = "{model}"


@dataclass(frozen=True)
class Path:
    """is_on:     whether vLLM accepted `engine`
    in_pieces: prefill in steps of one and a half blocks
    crowded:   all prompts at once, in too few blocks
    restart:   a second engine loads
    """

    about: str
    engine: dict[str, Any] = field(default_factory=dict)
    is_on: Callable[[Started], bool] = lambda started: True
    config: dict[str, Any] = field(default_factory=dict)
    in_pieces: bool = False
    crowded: bool = False
    restart: bool = False


PATHS: dict[str, Path] = {
    "plain": Path("as vLLM runs it by default, prefix caching on"),
    "no-prefix-caching": Path(
        "vLLM's own prefix caching off",
        {"enable_prefix_caching": False},
        lambda started: not started.prefix_caching,
    ),
    "chunked-prefill": Path(
        "prompts computed in pieces",
        {"enable_chunked_prefill": True},
        lambda started: started.chunked_prefill,
        in_pieces=True,
    ),
    "preemption": Path("too few blocks for all requests, so that some are preempted", crowded=True),
    "new-engine": Path("stored by one engine, loaded by the next", restart=True),
    "tp2": Path("tensor parallel, two workers", {"tensor_parallel_size": 2}),
    "pp2": Path("pipeline parallel, two workers", {"pipeline_parallel_size": 2}),
    "fp8-kv": Path("KV cache in fp8", {"kv_cache_dtype": "fp8"}),
    "ngram": Path(
        "speculation from the prompt",
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 3,
            }
        },
    ),
    "draft": Path(
        "speculation by a draft model: the model itself",
        {
            "speculative_config": {
                "method": "draft_model",
                "model": ITSELF,
                "num_speculative_tokens": 3,
            }
        },
    ),
    "layerwise": Path(
        "loads and stores inside the passes, a layer at a time",
        {"enable_prefix_caching": False, "async_scheduling": False},
        lambda started: not started.prefix_caching,
        {"layerwise": True},
    ),
    "cuda-graphs": Path(
        "decoding passes replayed as CUDA graphs",
        {
            "enforce_eager": False,
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        },
        lambda started: started.cuda_graphs,
    ),
    "async": Path(
        "asynchronous scheduling",
        {"async_scheduling": True},
        lambda started: started.async_scheduling,
    ),
}

DEFAULT = ("plain", "no-prefix-caching", "chunked-prefill", "preemption", "new-engine", "tp2")
