"""A tier from its line: what is known is made, what is wrong is said, with the line and without its
secrets.
"""

import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest

from kvhold.core.config import load_config
from kvhold.core.errors import ConfigError, KVHoldError
from kvhold.tiers import registry
from kvhold.tiers.audit import AuditTier
from kvhold.tiers.disk import DiskTier
from kvhold.tiers.faults import FaultTier
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.null import NullTier
from kvhold.tiers.registry import make_tier, tier_schemes
from tests.tiers.memory import PLUGIN, MemoryTier, a_place


def refusal(line: str, plugins: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as refused:
        make_tier(line, plugins=plugins)
    return str(refused.value)


class TestWhatIsMade:
    def test_a_tier_by_its_scheme_named_after_it(self) -> None:
        tier, guard = make_tier("disk:///x?max_bytes=1GiB")
        assert isinstance(tier, DiskTier)
        assert guard == GuardConfig(name="disk")

    def test_what_is_the_guard_s_goes_to_the_guard(self) -> None:
        tier, guard = make_tier(
            "null://?name=n&read_only=true&get_timeout_s=2.5&batch_bytes=1MiB&breaker_failures=9"
        )
        assert isinstance(tier, NullTier)
        assert guard == GuardConfig(
            name="n", read_only=True, get_timeout_s=2.5, batch_bytes=1 << 20, breaker_failures=9
        )

    def test_an_empty_name_is_the_scheme_s(self) -> None:
        assert make_tier("disk:///x?name=")[1].name == "disk"

    def test_no_option_of_a_tier_is_one_of_the_guard_s(self) -> None:
        from dataclasses import fields

        from kvhold.tiers.disk.tier import DiskConfig

        assert not {f.name for f in fields(DiskConfig)} & {f.name for f in fields(GuardConfig)}

    def test_wrappers_stand_around_it_the_first_outermost_each_with_its_own_options(self) -> None:
        tier, guard = make_tier(
            "audit+faults+disk:///x?faults=get:error:0.5&audit_max_keys=7&name=n"
        )
        assert isinstance(tier, AuditTier)
        assert isinstance(tier._inner, FaultTier)
        assert isinstance(tier._inner._inner, DiskTier)
        assert [rule.name for rule in tier._inner.rules] == ["get:error"]
        assert guard.name == "n"

    def test_every_scheme_of_ours_is_named(self) -> None:
        assert {"disk", "fs", "redis", "s3", "null", "plugin"} <= set(tier_schemes())
        assert list(tier_schemes()) == sorted(tier_schemes())

    def test_nothing_is_imported_for_a_scheme_that_is_not_used(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delitem(sys.modules, "kvhold.tiers.s3", raising=False)
        make_tier("null://")
        assert "kvhold.tiers.s3" not in sys.modules


class TestRefusals:
    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("", "is not a tier's URL"),
            ("disk", "'disk' is not a tier's URL"),
            ("dsik:///x", "did you mean 'disk'?"),
            ("disk:///x?max_byte=1", "did you mean 'max_bytes'?"),
            ("disk:///x?max_bytes=much", "max_bytes = 'much'"),
            ("disk:///x?get_timeout_s=0", "get_timeout_s = '0': must be at least 0.001"),
            ("disk:///x?concurrent_calls=many", "must be a whole number"),
            ("disk:///x?read_only=perhaps", "must be true or false"),
            ("disk:///x?a", "options are written ?name=value"),
            ("disk:///x?sync=true&sync=false", "twice"),
            ("disk:///x#y", "fragment"),
            ("what+disk:///x", "'what' wraps no tier; audit, faults do"),
            ("disk+audit:///x", "'disk' wraps no tier"),
            ("audit+:///x", "there is no tier ''"),
            ("disk:///x?faults=get:error", "no setting 'faults'"),
            ("faults+disk:///x?faults=nonsense", "the fault 'nonsense'"),
            ("redis://h:99999", "is not host:port"),
            ("plugin://json", "write plugin://module:Class"),
            ("plugin://:Tier", "write plugin://module:Class"),
            ("plugin://.relative:Tier", "write plugin://module:Class"),
            ("plugin://m:not-a-name", "write plugin://module:Class"),
        ],
    )
    def test_a_line_that_cannot_be_is_a_config_error_that_says_why(
        self, line: str, said: str
    ) -> None:
        assert said in refusal(line)
        assert line.partition("?")[0].partition("#")[0].partition(":")[0] in refusal(line)

    @pytest.mark.parametrize(
        "line",
        [
            "Redis://me:hunter2@host",
            "redis:/me:hunter2@host",
            "redis://me:hunter2@ho℀st/0",
            "redis://me:hunter2@[::1/0",
            "redis://me:hunter2@host:nope",
            "redis://me:hunter2@host/0?nope=1",
            "redis://me:hunter2@host/0?db=x",
            "redis://me:hunter2@host/0#x",
            "redis://me:hunter2@host/0?x",
            "redis://me:hunter2@host/0?db=1&db=2",
            "redis://:x/hunter2@host/0",
            "redis://:hunter2?x@host/0",
            "redis://:hunter2?x=y@host:6379/0",
            "redis://:hunter2?faults=y@host:6379/0",
            "audit+redis://:x?faults=hunter2@host:6379/0",
            "faults+redis://:hunter2?faults=y@host:6379/0",
            "faults+redis://:x?faults=hunter2@host:6379/0?faults=get:hang:@3",
            "faults+redis://:hunter2?faults=get:hang:@3@host:6379/0",
            "faults+redis://:hunter2?faults=get:hang:@3.example:6379/0",
            "redis://me:x?y=hunter2@host/0",
            "redis://me:x@y?z=hunter2@host/0",
            "redis://x@y/hunter2@host/0",
            "kvhold://hunter2/x@host:7710",
            "kvhold://x/hunter2@host:7710",
            "kvhold:///hunter2@host:7710",
            "redis:/:hunter2?x@host/0",
            "redis://:hunter2?x@[::1/0",
            "redis://:hunter2[?x@host/0",
            "redis://host/0?password=hunter2&nope=1",
            "redis://host/0?passwd=hunter2",
            "redis://host/0?auth=hunter2",
            "s3://bucket?secret_access_key=hunter2&nope=1",
            "s3://bucket?session_token=hunter2&nope=1",
            "nowhere://me:hunter2@host",
            "what+redis://me:hunter2@host",
            "plugin://me:hunter2@m:C",
            "null://me:hunter2@host",
        ],
    )
    def test_no_refusal_shows_a_secret(self, line: str) -> None:
        assert "hunter2" not in refusal(line)

    @pytest.mark.parametrize(
        "tiers",
        [
            ["redis://me:hunter2@host/0 "],
            ["disk:///x", {"url": "redis://me:hunter2@host", "name": "a b"}, 3],
            [{"uri": "redis://me:hunter2@host"}],
            {"redis": "redis://me:hunter2@host"},
        ],
    )
    def test_nor_does_one_of_the_whole_list(self, tiers: object) -> None:
        with pytest.raises(ConfigError) as refused:
            load_config({"tiers": tiers}, environ={})
        assert "hunter2" not in str(refused.value)
        assert "tiers" in str(refused.value)

    def test_a_package_that_is_not_installed_is_named_with_the_command_that_brings_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "obstore", None)
        monkeypatch.setattr(registry, "import_module", _without_obstore)
        assert "pip install 'kvhold[s3]'" in refusal("s3://bucket")


def _without_obstore(name: str) -> ModuleType:
    raise ImportError(f"No module named 'obstore' (for {name})")


class _Odd:
    """What plugins may be that are no tiers."""

    @classmethod
    def from_url(cls, url: object) -> Any:
        raise RuntimeError("not today")


class TestPlugins:
    def test_one_by_module_and_class_runs_only_when_it_is_listed(self) -> None:
        with a_place() as place:
            assert isinstance(make_tier(place.url(), plugins=(PLUGIN,))[0], MemoryTier)
            said = refusal(place.url())
        assert PLUGIN in said
        assert "`plugins`" in said

    def test_its_module_is_not_imported_before_it_is_listed(self) -> None:
        refusal("plugin://antigravity:Tier")
        assert "antigravity" not in sys.modules

    @pytest.mark.parametrize(
        ("named", "said"),
        [
            ("no_such_module_here:Tier", "No module named"),
            ("json:Tier", "module json has no Tier"),
            ("json:JSONDecoder", "from_url"),
            ("os:getcwd", "from_url"),
            ("tests.tiers.test_registry:_Odd", "RuntimeError: not today"),
        ],
    )
    def test_one_that_is_no_tier_is_a_config_error(self, named: str, said: str) -> None:
        assert said in refusal(f"plugin://{named}", plugins=(named,))

    def test_one_whose_import_fails_is_a_config_error(
        self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "kvhold_test_broken.py").write_text("def broken(:\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        assert "SyntaxError" in refusal(
            "plugin://kvhold_test_broken:Tier", plugins=("kvhold_test_broken:Tier",)
        )

    def test_one_by_its_entry_point_runs_only_when_it_is_listed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        point = EntryPoint("mine", PLUGIN, registry.ENTRY_POINTS)
        monkeypatch.setattr(registry, "_plugins", lambda: {"mine": point})
        with a_place() as place:
            line = f"mine://?place={place.name}"
            assert isinstance(make_tier(line, plugins=("mine",))[0], MemoryTier)
            assert "add it to the setting `plugins`" in refusal(line)
        assert "mine" in tier_schemes()

    def test_none_takes_the_place_of_a_tier_of_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        point = EntryPoint("disk", PLUGIN, registry.ENTRY_POINTS)
        monkeypatch.setattr(registry, "_plugins", lambda: {"disk": point})
        assert isinstance(make_tier("disk:///x", plugins=("disk",))[0], DiskTier)

    def test_what_a_tier_itself_refuses_is_passed_on_as_it_is(self) -> None:
        with pytest.raises(KVHoldError, match="there is no place"):
            make_tier(
                "plugin://kvhold.tiers.null:NullTier", plugins=("kvhold.tiers.null:NullTier",)
            )
