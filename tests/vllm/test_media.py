"""Images and the like are known by all of their content, whatever vLLM or the user calls them."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import numpy as np
import torch
from vllm.multimodal.inputs import PlaceholderRange

from kvhold.core.keys import Insert
from kvhold.integrations.vllm import media
from kvhold.integrations.vllm.media import Media, MediaError

pytestmark = pytest.mark.vllm

PIXELS = torch.arange(48, dtype=torch.float32).reshape(3, 4, 4)


def feature(
    identifier: str = "photo",
    modality: str = "image",
    offset: int = 2,
    length: int = 9,
    **data: Any,
) -> Any:
    """As vLLM has it: a processor's tensors by name; none, where it has been there before."""
    elements = {name: SimpleNamespace(data=value) for name, value in data.items()} or None
    return SimpleNamespace(
        identifier=identifier,
        modality=modality,
        mm_position=PlaceholderRange(offset=offset, length=length),
        data=elements,
    )


def inserts(memory: Media, *features: Any) -> list[Insert] | None:
    """None: refused."""
    try:
        return memory.inserts_of(SimpleNamespace(mm_features=list(features)))
    except MediaError:
        return None


def digest(**data: Any) -> bytes | str:
    found = inserts(Media(), feature(**data))
    assert found is not None
    return found[0].digest


def test_place_and_content_are_told() -> None:
    found = inserts(
        Media(), feature(pixels=PIXELS), feature("other", offset=20, length=4, pixels=PIXELS + 1)
    )
    assert found is not None
    assert [(insert.start, insert.length) for insert in found] == [(2, 9), (20, 4)]
    assert found[0].digest != found[1].digest


def test_a_text_has_none() -> None:
    assert inserts(Media()) == []


def test_what_the_user_calls_it_does_not_matter() -> None:
    assert digest(identifier="a", pixels=PIXELS) == digest(identifier="b", pixels=PIXELS.clone())
    assert digest(identifier="a", pixels=PIXELS) != digest(identifier="a", pixels=PIXELS + 1)


def test_everything_counts() -> None:
    one_bit = PIXELS.clone()
    one_bit.view(torch.int32)[2, 3, 3] ^= 1
    contents: list[dict[str, Any]] = [
        {"pixels": PIXELS},
        {"pixels": one_bit},
        {"pixels": PIXELS.reshape(4, 3, 4)},
        {"pixels": PIXELS.to(torch.bfloat16)},
        {"pixels": PIXELS.view(torch.int32)},
        {"pixels": PIXELS.numpy()},
        {"other": PIXELS},
        {"pixels": PIXELS, "modality": "video"},
        {"pixels": PIXELS, "grid": torch.tensor([1, 4, 4])},
        {"pixels": PIXELS, "grid": [1, 4, 4]},
        {"pixels": PIXELS, "grid": [1, 44]},
        {"pixels": PIXELS, "grid": [[1, 4], 4]},
        {"pixels": PIXELS, "grid": ["1", "4", "4"]},
        {"pixels": PIXELS, "grid": torch.tensor(4)},
        {"pixels": [PIXELS[0], PIXELS[1:]]},
        {"pixels": torch.empty(0)},
    ]
    assert len({digest(**content) for content in contents}) == len(contents)


def test_which_of_its_tokens_are_the_image_counts() -> None:
    plain, masked = feature(pixels=PIXELS), feature(pixels=PIXELS)
    masked.mm_position = PlaceholderRange(
        offset=2, length=9, is_embed=torch.tensor([True] * 8 + [False])
    )
    one, two = inserts(Media(), plain), inserts(Media(), masked)
    assert one is not None and two is not None
    assert one[0].digest != two[0].digest


def test_memory_in_another_order_is_the_same_content() -> None:
    assert digest(pixels=PIXELS) == digest(
        pixels=PIXELS.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    )
    assert digest(pixels=PIXELS.numpy()) == digest(pixels=np.asfortranarray(PIXELS.numpy()))


def test_what_vllm_leaves_out_is_known_from_before_or_not_at_all() -> None:
    memory = Media()
    assert inserts(memory, feature()) is None
    told = inserts(memory, feature(pixels=PIXELS))
    assert inserts(memory, feature()) == told
    assert inserts(memory, feature(), feature("another")) is None
    assert inserts(memory, feature()) == told


def request_of(*features: Any) -> Any:
    return SimpleNamespace(mm_features=list(features))


def test_an_identifier_of_two_contents_names_neither_from_then_on() -> None:
    """vLLM computes the second with the KV and the embeddings of the first."""
    memory = Media()
    first, second = feature("cat", pixels=PIXELS), feature("cat", pixels=PIXELS + 1)
    assert inserts(memory, first) is not None
    assert memory.is_certain(request_of(first))
    assert inserts(memory, second, feature("dog", pixels=PIXELS)) is None
    assert not memory.is_certain(request_of(first)), "what runs is not stored"
    assert inserts(memory, first) is None
    assert inserts(memory, feature("cat")) is None
    assert inserts(memory, feature("dog", pixels=PIXELS)) is not None
    assert inserts(memory, feature("dog", pixels=PIXELS), second) is None


def test_a_content_that_cannot_be_told_spoils_its_identifier() -> None:
    memory = Media()
    assert inserts(memory, feature("cat", pixels=None)) is None
    assert inserts(memory, feature("cat", pixels=PIXELS)) is None


def test_content_that_cannot_be_read_spoils_its_identifier_and_no_request_waits_for_it() -> None:
    memory = Media()
    broken = feature("cat", pixels=torch.empty(3, device="meta"))  # it has no bytes
    memory.announce(request_of(broken))
    with pytest.raises(Exception, match="meta"):
        memory.inserts_of(request_of(broken))
    assert inserts(memory, feature("cat", pixels=PIXELS)) is None
    assert not memory._announced


def test_nothing_is_certain_while_another_request_waits_to_be_read() -> None:
    memory = Media()
    one, two = feature("cat", pixels=PIXELS), feature("cat", pixels=PIXELS + 1)
    memory.announce(request_of(one))
    assert not memory.is_certain(request_of(one))
    inserts(memory, one)
    assert memory.is_certain(request_of(one))
    memory.announce(request_of(feature("dog")))
    assert memory.is_certain(request_of(one)), "another identifier waits"
    memory.announce(request_of(two))
    assert not memory.is_certain(request_of(one))
    inserts(memory, two)
    assert not memory.is_certain(request_of(one))
    assert memory.is_certain(request_of()), "text is certain"


def test_content_in_shared_memory_is_refused() -> None:
    """With mm_processor_cache_type = shm the engine has a handle: its numbers change."""
    handle = feature("cat", address=1, monotonic_id=2, signature=b"x")
    with pytest.raises(MediaError, match="mm_processor_cache_type is shm"):
        Media().inserts_of(request_of(handle))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "_REMEMBERED", 3)
    memory = Media()
    for name in "abc":
        inserts(memory, feature(name, pixels=PIXELS))
    inserts(memory, feature("a"))
    inserts(memory, feature("d", pixels=PIXELS))
    assert inserts(memory, feature("b")) is None, "the one that was asked for least lately is gone"
    assert inserts(memory, feature("a")) and inserts(memory, feature("d"))


def test_content_of_unknown_make_is_an_error_and_so_not_cached() -> None:
    with pytest.raises(TypeError, match="object"):
        digest(pixels=object())
    with pytest.raises(TypeError, match="ndarray"):
        digest(pixels=np.array([object()]))


def test_content_with_a_missing_part_is_refused() -> None:
    """Embeddings that were left out are None among a processor's tensors, or not there at all."""
    assert inserts(Media(), feature("cat", embeds=None, grid=torch.tensor([1, 4, 4]))) is None
    empty = feature("cat")
    empty.data = {}
    assert inserts(Media(), empty) is None


def test_what_is_left_of_two_images_whose_embeddings_come_from_elsewhere_names_neither() -> None:
    """With `allow_missing_mm_embeddings` a request may have an image's size alone."""
    memory = Media(embeddings_may_be_missing=True)
    for name in ("cat", "dog"):
        assert inserts(memory, feature(name, grid=torch.tensor([1, 4, 4]))) is None
    assert inserts(memory) == [], "text is as it was"
