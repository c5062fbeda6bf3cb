"""The tags of namespaces are known, bounded, and kept in a file that a crash may cut."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.cache.index import namespace_tags
from kvhold.cache.index.namespace_tags import KnownTags, NamespaceTags, split_tags
from kvhold.cache.transfer import tags_file
from kvhold.cache.transfer.tags_file import TagsFile
from kvhold.core.errors import ConfigError
from kvhold.core.keys import NAMESPACE_BYTES, Namespace
from kvhold.core.store_options import StoreOptions
from kvhold.core.tags import MOST_TAG, TAG_BYTES, parse_tag, tag_digest, tag_digests
from kvhold.testing.cache import PLAIN, a_prompt

SPACES = [number.to_bytes(NAMESPACE_BYTES, "big") for number in range(40)]
TAGS = [tag_digest("name", str(number)) for number in range(4)]

spaces = st.sampled_from(SPACES[:6])
some_tags = st.lists(st.sampled_from(TAGS), unique=True).map(b"".join)


@given(st.lists(st.tuples(spaces, some_tags), max_size=30))
def test_it_finds_the_namespaces_with_a_tag(learned: list[tuple[bytes, bytes]]) -> None:
    told: list[tuple[bytes, bytes]] = []
    tags = NamespaceTags(lambda *one: told.append(one))
    model: dict[bytes, bytes] = {}
    for space, of_space in learned:
        tags.learn(space, of_space)
        model[space] = of_space or model.get(space, b"")
    for tag in TAGS:
        wanted = {space for space, of_space in model.items() if tag in split_tags(of_space)}
        assert set(tags.carrying(tag)) == wanted
    assert dict(told) == model
    assert all((space in tags) == (space in model) for space in SPACES)


def test_it_is_bounded_and_ignores_what_are_no_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_tags, "MOST_KNOWN", 8)
    tags = NamespaceTags(lambda *_: None)
    for space in SPACES:
        tags.learn(space, TAGS[0])
    assert tags.carrying(TAGS[0]) == SPACES[-8:]
    assert tags.num_forgotten == len(SPACES) - 8
    tags.learn(SPACES[0], b"x" * (TAG_BYTES + 1))
    tags.learn(b"short", TAGS[0])
    assert tags.carrying(TAGS[0]) == SPACES[-8:]


@given(st.text(), st.text(min_size=1).filter(lambda name: "=" not in name))
def test_a_tag_is_a_name_and_a_value(value: str, name: str) -> None:
    text = f"{name}={value}"
    if len(text) > MOST_TAG:
        with pytest.raises(ConfigError, match="NAME=VALUE"):
            parse_tag(text)
    else:
        assert parse_tag(text) == (name, value)
    for wrong in (name, f"={value}", ""):
        with pytest.raises(ConfigError, match="NAME=VALUE"):
            parse_tag(wrong)


def test_queries_and_stores_name_the_tags_of_their_namespace_without_the_budget() -> None:
    space = Namespace("model", PLAIN, tags=(("b", "2"), ("a", "1"))).allowing_loss(0.1)
    joined = b"".join(sorted((tag_digest("a", "1"), tag_digest("b", "2"))))
    assert a_prompt(space, 16).query().tags == tag_digests(space.tags) == joined
    assert a_prompt(Namespace("model", PLAIN), 16).query().tags == b""
    assert tag_digest("a", "b=") != tag_digest("a=b", "")
    with pytest.raises(ValueError, match="65 tags; at most 64"):
        StoreOptions(tags=tag_digests((str(number), "") for number in range(65)))


def test_a_file_keeps_them_and_its_start(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tags"
    first = TagsFile(path).read()
    assert first.since_s is not None and not first.tags and not first.forgotten
    file = TagsFile(path)
    file.read()
    file.add(SPACES[0], TAGS[0])
    file.add(SPACES[1], b"")
    file.add(SPACES[0], TAGS[1])
    again = TagsFile(path).read()
    assert again == KnownTags({SPACES[1]: b"", SPACES[0]: TAGS[1]}, first.since_s)
    assert len(path.read_text().splitlines()) == 3, "repeated ones are dropped"
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="tags cannot be read"):
        TagsFile(path).read()


def test_a_file_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (namespace_tags, tags_file):
        monkeypatch.setattr(module, "MOST_KNOWN", 8)
    monkeypatch.setattr(tags_file, "_MOST_LINES", 16)
    file = TagsFile(tmp_path / "tags")
    file.read()
    for space in SPACES:
        file.add(space, TAGS[0])
        assert len((tmp_path / "tags").read_text().splitlines()) <= 17
    known = TagsFile(tmp_path / "tags").read()
    assert (list(known.tags), known.forgotten) == (SPACES[-8:], len(SPACES) - 8)


@given(st.integers(0, 300), st.binary(max_size=20))
def test_a_cut_or_damaged_file_tells_that_it_has_forgotten(
    tmp_path_factory: pytest.TempPathFactory, cut: int, rest: bytes
) -> None:
    path = tmp_path_factory.mktemp("tags") / "tags"
    file = TagsFile(path)
    file.read()
    for space in SPACES[:5]:
        file.add(space, TAGS[0])
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] + rest)
    known = TagsFile(path).read()
    assert all(known.tags[space] == TAGS[0] for space in SPACES[:5] if space in known.tags)
    content = whole[:cut] + rest
    in_head, left = cut <= whole.index(b"\n"), whole[len(content) :]
    at_line_end = whole.startswith(content) and b"\n" in (content[-1:], left[:1])
    if len(known.tags) < 5:
        assert known.forgotten or in_head or at_line_end
    assert TagsFile(path).read().tags == known.tags, "it is whole again"
    file = TagsFile(path)
    file.read()
    file.add(SPACES[7], TAGS[1])
    assert TagsFile(path).read().tags == dict(known.tags) | {SPACES[7]: TAGS[1]}
