"""Weights are named by their content, and what was noted about it is believed only if it is whole
and this user's own.
"""

import os
from pathlib import Path

import pytest

from kvhold.integrations import weights
from kvhold.integrations.weights import model_identity


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that digests are kept in, of files that have just been written, too."""
    monkeypatch.setattr(weights, "_SETTLED_NS", -(10**18))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvhold" / "weights"


def make_model(folder: Path, content: bytes) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    return str(folder)


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    return [make_model(tmp_path / name, name.encode() * 100) for name in ("one", "two")]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read."""
    names: list[str] = []
    hash_file = weights._hash

    def counted(path: Path) -> str:
        names.append(path.name)
        return hash_file(path)

    monkeypatch.setattr(weights, "_hash", counted)
    return names


def identities(models: list[str]) -> list[str]:
    return [model_identity(model, None) for model in models]


class TestNotes:
    def test_whole_ones_spare_the_second_reading(
        self, models: list[str], notes: Path, hashed: list[str]
    ) -> None:
        first = identities(models)
        hashed.clear()
        assert identities(models) == first
        assert hashed == []

    @pytest.mark.parametrize(
        "damage", ["", "0" * 32, "0" * 32 + " " + "0" * 32, "\0" * 65, "z" * 65, "0" * 10_000]
    )
    def test_damaged_ones_are_not_believed(
        self, models: list[str], notes: Path, damage: str
    ) -> None:
        """A power failure may leave an empty file, or one of zeros."""
        first = identities(models)
        for note in notes.iterdir():
            note.write_text(damage)
        assert identities(models) == first

    def test_those_of_other_files_are_not_believed(self, models: list[str], notes: Path) -> None:
        first = identities(models)
        contents = [note.read_text() for note in notes.iterdir()]
        for note, content in zip(notes.iterdir(), contents[1:] + contents[:1], strict=True):
            note.write_text(content)
        assert identities(models) == first

    def test_those_of_other_users_are_not_believed(
        self, models: list[str], notes: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = identities(models)
        hashed.clear()
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        assert identities(models) == first
        assert len(hashed) == 4, "all were read again"

    def test_a_link_in_their_place_is_not_followed(
        self, models: list[str], notes: Path, hashed: list[str], tmp_path: Path
    ) -> None:
        identities(models)
        notes.rename(tmp_path / "elsewhere")
        notes.symlink_to(tmp_path / "elsewhere")
        hashed.clear()
        identities(models)
        assert len(hashed) == 4

    def test_their_folder_is_closed_to_others(self, models: list[str], notes: Path) -> None:
        notes.mkdir(parents=True)
        notes.chmod(0o777)
        identities(models)
        assert notes.stat().st_mode & 0o777 == 0o700

    def test_a_file_that_has_just_changed_is_not_noted(
        self, models: list[str], notes: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its times may stay as they are when it changes again."""
        monkeypatch.setattr(weights, "_SETTLED_NS", 10**18)
        identities(models)
        assert not notes.exists() or not list(notes.iterdir())

    def test_a_file_that_changes_while_it_is_read_is_not_noted(
        self, models: list[str], notes: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hash_file = weights._hash

        def changing(path: Path) -> str:
            digest = hash_file(path)
            path.write_bytes(path.read_bytes() + b" ")
            return digest

        with monkeypatch.context() as patched:
            patched.setattr(weights, "_hash", changing)
            before = identities(models)
        assert set(identities(models)).isdisjoint(before)


class TestFiles:
    @pytest.mark.parametrize(
        "file",
        [
            "tokenizer-codec.safetensors",
            "vocab_embeddings.BIN",
            "tokenizer.pt",
            "vocab.npz",
            "tokenization/tokenizer.py",
            "LICENSE.gguf",
        ],
    )
    def test_weights_and_code_count_whatever_their_names_say(
        self, models: list[str], notes: Path, file: str
    ) -> None:
        before = model_identity(models[0], None)
        path = Path(models[0], file)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"more")
        assert model_identity(models[0], None) != before

    @pytest.mark.parametrize(
        "file", ["tokenizer.json", "tokenizer.model", "vocab.txt", "README.md"]
    )
    def test_tokenizers_and_documents_do_not(
        self, models: list[str], notes: Path, file: str
    ) -> None:
        before = model_identity(models[0], None)
        Path(models[0], file).write_bytes(b"more")
        assert model_identity(models[0], None) == before
