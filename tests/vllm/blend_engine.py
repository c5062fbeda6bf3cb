"""A real vLLM engine that blends: `python -m tests.vllm.blend_engine ARGUMENTS`.

ARGUMENTS are those of `engine_arguments`, in JSON. It answers lines of JSON, each a call of a
method of `_Engine` by its name and arguments.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvhold.blend.canary import Canary
from kvhold.blend.selection import BlendPlan, StoredSpan, parse_selector
from kvhold_lab.engines.stepped import SteppedEngine, environment_for

BLOCK, CHUNK = 32, 64


def engine_arguments(
    model: Path, socket: Path | None, *, blend: dict[str, Any] | None = None, **others: Any
) -> dict[str, Any]:
    connector = {
        "kv_connector": "KVHoldConnector",
        "kv_connector_module_path": "kvhold.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "tokens_per_chunk": CHUNK,
            "ram_bytes": "64MiB",
            "model_id": "blended",
            "node": {"socket": str(socket), "idle_exit_s": 60},
            "client": {"call_timeout_s": 30},
            "rules": {"plan": False},
            "blend": blend or {},
        },
    }
    return {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 64 << 20,
        "max_num_seqs": 4,
        "block_size": BLOCK,
        "seed": 0,
        "kv_transfer_config": None if socket is None else connector,
    } | others


def _rules(request: dict[str, Any]) -> dict[str, Any]:
    rules: dict[str, Any] = dict(request.get("rules", {}))
    if "spans" in request:
        rules["spans"] = request["spans"]
    return rules


def ask(engine: SteppedEngine, requests: list[dict[str, Any]]) -> tuple[list[str], list[list[int]]]:
    """The names and the tokens of each."""
    names = [
        engine.add(
            {"prompt_token_ids": one["tokens"]},
            max_tokens=one.get("max_tokens", 6),
            extra={"kv_transfer_params": {"kvhold": _rules(one)}},
        )
        for one in requests
    ]
    found: dict[str, list[int]] = {}
    while engine.is_busy():
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
    engine.drain()
    return [engine.inner_name(name) for name in names], [found[name] for name in names]


@contextmanager
def counted(engine: SteppedEngine) -> Iterator[Counter[str]]:
    """What both sides count meanwhile."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    counts: Counter[str] = Counter()
    sides = (
        engine.core.scheduler.get_kv_connector().scheduler.tally,
        get_kv_transfer_group().worker.tally,
    )
    plain = type(sides[0]).add

    def count(tally: Any, name: str, value: float, *labels: str) -> None:
        counts[":".join((name, *labels))] += int(value)
        plain(tally, name, value, *labels)

    for tally in sides:
        tally.add = count.__get__(tally)
    try:
        yield counts
    finally:
        for tally in sides:
            del tally.add


class _Engine:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self._stepped = SteppedEngine(arguments)
        self._model = arguments["model"]
        self._scheduler = self._stepped.core.scheduler.get_kv_connector().scheduler
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._blends = get_kv_transfer_group().worker.blends
        self._claim = self._blends._cache.claim

    def ask(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """vLLM's own cache is empty at first."""
        assert self._stepped.reset_prefix_cache()
        with counted(self._stepped) as counts:
            names, tokens = ask(self._stepped, requests)
        return {"names": names, "tokens": tokens, "counts": counts}

    def select(self, selector: str) -> None:
        self._scheduler.blends._selector = parse_selector(selector)
        self._blends._selector = parse_selector(selector)

    def canary(self, share: float, bound: float) -> None:
        permits = self._scheduler.blends._permits
        self._blends._canary = Canary(permits, share=share, bound=bound)

    def lose_claims(self, *, lose: bool) -> None:
        """Leases that the blend asks for are lost, and those of exact hits, too."""
        self._blends._cache.claim = (lambda *_, **__: None) if lose else self._claim

    def refusal(self) -> str:
        return str(self._blends.refusal)

    def compare(self, tokens: list[int], spans: list[tuple[int, int]]) -> float:
        """The error of the KV in the request's blocks against transformers' Blender."""
        model, written = self._blends._model, []
        write = model.write

        def note(kv: Any, num_tokens: int, block_ids: Any, scratch: Any = ()) -> None:
            write(kv, num_tokens, block_ids, scratch)
            if not scratch:
                caches = dict(zip(model.layer_names, model._caches, strict=True))
                blocks = [caches[name][list(block_ids)] for name in model._part.layer_names]
                found = model.empty(len(tokens) - 1)
                model.read(blocks, found, 0, 0, len(tokens) - 1)
                written.append(found)

        model.write = note
        try:
            self.ask([{"tokens": tokens, "spans": spans}])
        finally:
            del model.write
        (found,) = written
        expected = _by_transformers(self._model, tokens, spans, self._blends._selector)
        return max(
            float((ours - theirs).norm() / theirs.norm())
            for one, other in zip(found.layers, expected.layers, strict=True)
            for ours, theirs in ((one.keys, other.keys), (one.values, other.values))
        )

    def close(self) -> None:
        self._stepped.close()


def _by_transformers(
    folder: str, tokens: list[int], spans: list[tuple[int, int]], selector: Any
) -> Any:
    """Spans of whole blocks, as vLLM stores them."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvhold.integrations.transformers.blending import Blender

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    blender, most, prompt = Blender(model), len(tokens) - 1, torch.tensor(tokens)[None]
    kv, stored = blender.geometry.allocated(1, len(tokens)), []
    for start, given in spans:
        whole = (given - start) // BLOCK * BLOCK
        if not whole:
            continue
        alone = blender.geometry.empty()
        with torch.no_grad():
            model(prompt[:, start : start + whole], past_key_values=alone, use_cache=True)
        end = min(start + whole, most)
        for ours, theirs in zip(kv.layers, alone.layers, strict=True):
            ours.keys[:, :, start:end] = theirs.keys[:, :, : end - start]
            ours.values[:, :, start:end] = theirs.values[:, :, : end - start]
        stored.append(StoredSpan(start, end, text_end=given))
    blender.prefill(prompt, kv, BlendPlan(len(tokens), tuple(stored)), selector)
    kv.crop(most)
    return kv


def main(arguments: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints
    engine = _Engine(arguments)
    for line in sys.stdin:
        name, given = json.loads(line)
        print(json.dumps(getattr(engine, name)(**given)), file=answers)


if __name__ == "__main__":
    os.environ.update(environment_for(1))
    main(json.loads(sys.argv[1]))
