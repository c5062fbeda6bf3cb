"""The worker's model computes some tokens of a prompt over KV of the others.

On the engine's thread, between passes.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvhold.blend.prefill import Narrowing, decoder_layers, narrowed_layers, prefill
from kvhold.blend.proof import TOKENS, prove
from kvhold.blend.rows import FlowingRows, LayerKV, PromptKV
from kvhold.blend.selection import BlendPlan, Selector
from kvhold.core.errors import ConfigError, LayoutError
from kvhold.integrations.vllm.blending.blocks import BlockElements, write_blocks
from kvhold.integrations.vllm.blending.refusals import rope_of
from kvhold.integrations.vllm.geometry import Part

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class EngineModel:
    """layer_names: of the decoder layers' attention, in their order"""

    def __init__(
        self, config: "VllmConfig", spec: Any, part: Part, kv_caches: Mapping[str, Any]
    ) -> None:
        """Tries the model. Raises LayoutError."""
        self._config = config
        self._part = part
        try:
            known = config.compilation_config.static_forward_context
            attentions = [known[name] for name in part.layer_names]
            _check(attentions)
            self.model = _model_of(attentions)
            self._layers = decoder_layers(self.model, len(attentions))
            self._attentions = [_attention_in(layer) for layer in self._layers]
            if set(self._attentions) != set(attentions):
                raise LayoutError("its attention is not in its decoder layers")
            self._rope = rope_of(config)
            self.layer_names = tuple(one.layer_name for one in self._attentions)
            self._caches = [kv_caches[name] for name in self.layer_names]
            self._size = part.group.block_tokens
            self._elements = BlockElements(
                self._attentions[0], torch.empty_like(self._caches[0][:1]), self._size
            )
            with torch.no_grad():
                prove(partial(self._fill, spec), self._blend_tokens)
        except (ConfigError, LayoutError) as error:
            kind = config.model_config.architecture
            raise LayoutError(f"kvhold does not blend with this {kind}: {error}") from error

    def empty(self, num_tokens: int) -> PromptKV:
        """Uninitialised."""
        group = self._part.group
        shape = (1, group.heads, num_tokens, group.head_dim)
        dtype = self._caches[0].dtype
        return PromptKV(
            [LayerKV(*(torch.empty(shape, dtype=dtype) for _ in range(2))) for _ in self._layers]
        )

    def scratch(self, num_blocks: int) -> list[Any]:
        """Blocks beside the engine's, in the order of the part's layers."""
        cache = self._caches[0]
        shape = (num_blocks, *cache.shape[1:])
        return [torch.zeros(shape, dtype=cache.dtype) for _ in self.layer_names]

    def read(self, scratch: Sequence[Any], kv: PromptKV, first: int, skip: int, end: int) -> None:
        """Copy tokens `skip` to before `end` of the blocks to those from `first + skip` on."""
        for name, layer in zip(self.layer_names, kv.layers, strict=True):
            blocks = scratch[self._part.layer_names.index(name)]
            begin = skip // self._size
            for plane, target in enumerate((layer.keys, layer.values)):
                into = target[0, :, first + skip : first + end]
                part = (
                    into
                    if skip == begin * self._size
                    else torch.empty_like(target[0, :, : end - begin * self._size])
                )
                self._elements.read(blocks[begin:], part, plane)
                if part is not into:
                    into.copy_(part[:, skip - begin * self._size :])

    def write(
        self, kv: PromptKV, tokens: int, block_ids: Sequence[int], scratch: Sequence[Any] = ()
    ) -> None:
        """The first tokens, into the engine's blocks or into `scratch`."""
        position = torch.arange(tokens)
        slots = torch.tensor(block_ids)[position // self._size] * self._size + (
            position % self._size
        )
        for number, (attention, layer) in enumerate(zip(self._attentions, kv.layers, strict=True)):
            blocks = self._caches[number]
            if scratch:
                blocks = scratch[self._part.layer_names.index(self.layer_names[number])]
            keys, values = (
                part[0, :, :tokens].transpose(0, 1) for part in (layer.keys, layer.values)
            )
            write_blocks(attention, keys, values, blocks, slots)

    def prefill(self, tokens: Any, kv: PromptKV, plan: BlendPlan, selector: Selector) -> Any:
        """Complete `kv`, see `kvhold.blend.prefill`. Returns hidden states and positions,
        [recomputed] int64.

        tokens: [plan.num_tokens] int64
        """

        def compute(rows: FlowingRows, narrowing: Narrowing | None) -> Any:
            return self.compute(tokens, rows, narrowing)

        with torch.no_grad():
            return prefill(compute, kv, plan, selector, self._rope)

    def compute(self, tokens: Any, rows: FlowingRows, narrowing: Narrowing | None = None) -> Any:
        """Returns hidden states, [rows in the last layer, hidden]; only the last row counts."""
        positions = rows.positions
        with (
            torch.no_grad(),
            narrowed_layers(self._layers, rows, narrowing, axis=0),
            self._attending(rows),
            set_forward_context(None, self._config, num_tokens=len(positions), skip_compiled=True),
        ):
            return self.model(input_ids=tokens[positions], positions=positions)

    def logits(self, hidden: Any) -> Any:
        """Of the last row, [vocabulary]."""
        with torch.no_grad():
            return self.model.compute_logits(hidden[-1:])[0]

    @contextmanager
    def _attending(self, rows: FlowingRows) -> Iterator[None]:
        try:
            for attention in self._attentions:
                attention.forward = partial(_attend, rows, attention)
            yield
        finally:
            for attention in self._attentions:
                attention.__dict__.pop("forward", None)

    def _blend_tokens(self, kv: PromptKV, plan: BlendPlan, selector: Selector) -> None:
        self.prefill(torch.tensor(TOKENS), kv, plan, selector)

    def _fill(self, spec: Any, shift: int) -> PromptKV:
        count, block = len(TOKENS), 1
        starts = torch.tensor([0, count], dtype=torch.int32)
        slots = torch.arange(count) + block * self._size
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([count], dtype=torch.int32),
            num_reqs=1,
            num_actual_tokens=count,
            max_query_len=count,
            max_seq_len=count,
            block_table_tensor=torch.tensor([[block]], dtype=torch.int32),
            slot_mapping=slots,
        )
        names = list(self.layer_names)
        builder = self._attentions[0].get_attn_backend().get_builder_cls()
        metadata = builder(spec, names, self._config, torch.device("cpu")).build(0, common)
        scratch, before = self.scratch(block + 1), [one.kv_cache for one in self._attentions]
        kv = self.empty(count)
        try:
            for attention in self._attentions:
                attention.kv_cache = scratch[self._part.layer_names.index(attention.layer_name)]
            with set_forward_context(
                dict.fromkeys(names, metadata),
                self._config,
                num_tokens=count,
                slot_mapping=dict.fromkeys(names, slots),
                skip_compiled=True,
            ):
                positions = torch.arange(shift, shift + count)
                self.model(input_ids=torch.tensor(TOKENS), positions=positions)
        finally:
            for attention, was in zip(self._attentions, before, strict=True):
                attention.kv_cache = was
        self.read([blocks[block:] for blocks in scratch], kv, 0, 0, count)
        return kv


def _attend(
    rows: FlowingRows, attention: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> Any:
    queries, keys, values = (
        part.reshape(len(part), -1, attention.head_size).transpose(0, 1)[None]
        for part in (query, key, value)
    )
    rows.write(keys, values)
    layer = rows.kv.layers[rows.layer]
    found = rows.attend(queries, layer.keys, layer.values, attention.impl.scale)
    return found.reshape(found.shape[1], -1)


def _check(attentions: Sequence[Any]) -> None:
    for one in attentions:
        impl = one.impl
        window = getattr(impl, "sliding_window", None)
        reasons = {
            f"its attention is {type(one).__name__}": type(one) is not Attention,
            "it has ALiBi": getattr(impl, "alibi_slopes", None) is not None,
            "its attention is sliding": window not in (None, -1, (-1, -1)),
            "its attention is capped": bool(getattr(impl, "logits_soft_cap", 0)),
            "it has attention sinks": getattr(impl, "sinks", None) is not None,
            "layers share their KV": bool(getattr(one, "kv_sharing_target_layer_name", None)),
            "its queries are quantised": getattr(one, "query_quant", None) is not None,
            f"its KV is {one.kv_cache_dtype}": str(one.kv_cache_dtype).startswith(("fp8", "nvfp4")),
            "vLLM does not write its KV apart from attention": not hasattr(
                impl, "do_kv_cache_update"
            ),
        }
        if found := [reason for reason, applies in reasons.items() if applies]:
            raise LayoutError("; ".join(found))


def _model_of(attentions: Sequence[Any]) -> Any:
    """vLLM gives its model to no connector. Raises LayoutError."""
    found = [
        one
        for one in gc.get_objects()
        if issubclass(type(one), torch.nn.Module)
        and hasattr(type(one), "compute_logits")
        and set(attentions) <= set(one.modules())
    ]
    if not found:
        raise LayoutError("its model was not found in this process")
    return min(found, key=lambda model: len(list(model.modules())))


def _attention_in(layer: Any) -> Any:
    found = [one for one in layer.modules() if isinstance(one, Attention)]
    if len(found) != 1:
        raise LayoutError(f"a decoder layer has {len(found)} attentions")
    return found[0]
