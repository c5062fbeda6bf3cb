"""A permit is found as it was granted, or refused with the reason; a withdrawal lasts, in all
processes, until the next grant.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold.blend.permits import BlendRefusal, Permit, Permits, now, permit_model
from kvhold.core.blend_config import BlendConfig
from kvhold.core.errors import ConfigError
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
from tests.blend.permits import permit_of

SELECTOR = "query ratio=0.1"
LAYOUT = Layout(
    (Group(layers=2, planes=2, heads=2, head_dim=8, dtype="float16"),), tokens_per_chunk=4
)


def reason(permits: Permits, model: str = "tiny", selector: str = SELECTOR) -> str:
    found = permits.find(model, selector)
    assert isinstance(found, BlendRefusal), found
    return found.reason


@pytest.fixture
def permits(tmp_path: Path) -> Permits:
    return Permits(tmp_path / "permits")


class TestFind:
    def test_a_granted_permit_is_found_as_it_is(self, permits: Permits) -> None:
        permit = permit_of()
        path = permits.grant(permit)
        assert Permits(permits.folder).find("tiny", SELECTOR) == permit
        assert path.parent == permits.folder
        assert [child.name for child in permits.folder.iterdir()] == [path.name]

    def test_without_one_the_refusal_gives_the_command(self, permits: Permits) -> None:
        found = permits.find("tiny", SELECTOR, options="./model --dtype bfloat16")
        assert str(found) == (
            "served without blend: there is no permit for 'query ratio=0.1' with this model; run "
            "kvhold verify --blend ./model --dtype bfloat16 --selector 'query ratio=0.1'"
        )

    def test_it_is_for_one_model_and_selector(self, permits: Permits) -> None:
        permits.grant(permit_of())
        assert "no permit" in reason(permits, model="other")
        assert "no permit" in reason(permits, selector="query ratio=0.2")

    def test_a_file_in_another_s_place_is_refused(self, permits: Permits) -> None:
        path = permits.grant(permit_of())
        path.rename(permits.grant(permit_of(model="other")))
        assert "for another model or selector" in reason(permits, model="other")

    def test_the_settings_bounds_count_and_not_those_of_the_grant(self, permits: Permits) -> None:
        permits.grant(permit_of(f1_low=-0.03, max_f1_loss=0.05, kl_high=0.2))
        assert reason(permits) == (
            "F1 may be 0.030 lower by the measurement; blend.max_f1_loss is 0.01"
        )
        folder = permits.folder
        assert isinstance(Permits(folder, max_f1_loss=0.03).find("tiny", SELECTOR), Permit)
        strict = Permits(folder, max_f1_loss=0.03, max_kl=0.1)
        assert reason(strict) == (
            "the KL divergence may be 0.2 by the measurement; blend.max_kl is 0.1"
        )

    def test_the_default_folder_is_the_user_s(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
        assert Permits.of(BlendConfig()).folder == tmp_path / "kvhold" / "permits"
        monkeypatch.setenv("XDG_DATA_HOME", "relative")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert Permits.of(BlendConfig()).folder == tmp_path / ".local/share/kvhold/permits"
        assert Permits.of(BlendConfig(permits="~/mine")).folder == tmp_path / "mine"

    def test_a_model_has_one_name_in_all_engines(self) -> None:
        for model in ("named:tiny", "tiny"):
            assert permit_model(Namespace(model=model, layout=LAYOUT)) == "tiny"
        adapted = Namespace(model="tiny", layout=LAYOUT, lora="ab")
        assert permit_model(adapted) == "tiny lora=ab"


class TestDamage:
    """A file that is not a permit is none, whatever it holds."""

    @settings(max_examples=300, deadline=None)
    @given(data=st.data())
    def test_a_cut_or_changed_file_is_refused_or_a_valid_permit(
        self, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        permits = Permits(tmp_path_factory.getbasetemp() / "damaged")
        path = permits.grant(permit_of())
        raw = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            raw = raw[: data.draw(st.integers(0, len(raw) - 3))]
            expected = "is no permit"
        else:
            at = data.draw(st.integers(0, len(raw) - 1))
            raw[at] = data.draw(st.integers(0, 255))
            expected = ""
        path.write_bytes(raw)
        found = permits.find("tiny", SELECTOR)
        if isinstance(found, BlendRefusal):
            assert expected in found.reason
        else:
            assert not expected
            assert (found.model, found.selector) == ("tiny", SELECTOR)
            assert found.f1_low >= -0.01

    @given(raw=st.binary(max_size=200))
    def test_any_bytes_are_refused(
        self, raw: bytes, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        permits = Permits(tmp_path_factory.getbasetemp() / "bytes")
        permits.grant(permit_of()).write_bytes(raw)
        assert "is no permit: " in reason(permits)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"f1": 1.5}, "`$.f1`"),
            ({"f1_low": "0"}, "`$.f1_low`"),
            ({"f1_low": 0.5, "f1_high": 0.1}, "f1_low is above f1_high"),
            ({"prompts": 0}, "`$.prompts`"),
            ({"kl": None}, "`$.kl`"),
            ({"kl_high": -1}, "`$.kl_high`"),
            ({"model": ""}, "`$.model`"),
            ({"extra": 1}, "unknown field `extra`"),
        ],
    )
    def test_a_field_out_of_its_range_is_named(
        self, permits: Permits, change: dict[str, Any], message: str
    ) -> None:
        path = permits.grant(permit_of())
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        assert message in reason(permits)

    def test_a_missing_field_is_named(self, permits: Permits) -> None:
        path = permits.grant(permit_of())
        fields = json.loads(path.read_text())
        del fields["f1_low"]
        path.write_text(json.dumps(fields))
        assert "missing required field `f1_low`" in reason(permits)

    def test_neither_a_large_file_nor_a_pipe_nor_a_folder_is_read(self, permits: Permits) -> None:
        path = permits.grant(permit_of())
        path.write_bytes(path.read_bytes() + b" " * (16 << 10))
        assert "more than 16384 bytes" in reason(permits)
        path.unlink()
        os.mkfifo(path)
        assert "it is no file" in reason(permits)
        path.unlink()
        path.mkdir()
        assert "is no permit" in reason(permits)

    @pytest.mark.parametrize("wrong", [{"kl": float("inf")}, {"f1": float("nan")}, {"f1": 2.0}])
    def test_what_could_not_be_read_is_not_granted(
        self, permits: Permits, wrong: dict[str, float]
    ) -> None:
        with pytest.raises(ConfigError, match="not a permit"):
            permits.grant(permit_of(**wrong))
        assert not permits.folder.exists()

    def test_a_folder_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"blend.permits: cannot write .*/file/in/"):
            Permits(tmp_path / "file" / "in").grant(permit_of())


class TestWithdraw:
    def test_it_lasts_and_is_seen_by_other_processes(self, permits: Permits) -> None:
        permit = permit_of()
        permits.grant(permit)
        code = (
            "import sys; from pathlib import Path; from kvhold.blend.permits import *\n"
            "permits = Permits(Path(sys.argv[1]))\n"
            "permits.withdraw(permits.find('tiny', 'query ratio=0.1'), 'it drifted')"
        )
        subprocess.run([sys.executable, "-c", code, str(permits.folder)], check=True)
        assert reason(permits) == "the permit was withdrawn: it drifted"
        assert reason(Permits(permits.folder)) == "the permit was withdrawn: it drifted"

    def test_it_is_for_one_permit(self, permits: Permits) -> None:
        permits.grant(permit_of(selector="none"))
        permits.grant(permit_of())
        permits.withdraw(permit_of(), "it drifted")
        assert isinstance(permits.find("tiny", "none"), Permit)

    def test_a_new_grant_ends_it_and_an_old_permit_s_withdrawal_does_not_count(
        self, permits: Permits
    ) -> None:
        old, new = permit_of(granted="2026-01-01"), permit_of(granted="2026-01-02")
        permits.grant(old)
        permits.withdraw(old, "it drifted")
        permits.grant(new)
        assert permits.find("tiny", SELECTOR) == new
        permits.withdraw(old, "said late")
        assert permits.find("tiny", SELECTOR) == new
        permits.withdraw(new, "again")
        assert "again" in reason(permits)
        permits.grant(permit_of(granted="2026-01-03"))
        assert len(list(permits.folder.iterdir())) == 1

    @pytest.mark.parametrize("raw", [b"", b"{", b'{"reason": 1}', b"\xff" * 20_000])
    def test_a_damaged_record_still_withdraws(self, permits: Permits, raw: bytes) -> None:
        permits.grant(permit_of())
        permits.withdraw(permit_of(), "it drifted")
        (record,) = permits.folder.glob("*.withdrawn")
        record.write_bytes(raw)
        assert "its record cannot be read" in reason(Permits(permits.folder))

    def test_without_a_folder_it_holds_in_this_process(
        self, permits: Permits, caplog: pytest.LogCaptureFixture
    ) -> None:
        permit = permit_of()
        path = permits.grant(permit)
        raw = path.read_bytes()
        path.unlink()
        permits.folder.rmdir()
        permits.withdraw(permit, "it drifted")
        assert f"cannot withdraw {path} for other processes" in caplog.text
        permits.folder.mkdir()
        path.write_bytes(raw)
        assert "it drifted" in reason(permits)


def test_the_time_is_that_of_the_world() -> None:
    assert now().endswith("+00:00")


def test_a_permit_reads_as_json(permits: Permits) -> None:
    text = permits.grant(permit_of()).read_text()
    assert '\n  "selector": "query ratio=0.1",\n' in text
    assert msgspec.json.decode(text, type=Permit) == permit_of()
