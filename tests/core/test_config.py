"""Settings: arguments over environment over file over defaults; nothing is ignored, and every
refusal says where and what instead.
"""

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

import kvhold.tiers
from kvhold.core import config as config_module
from kvhold.core.config import Config, describe, load_config
from kvhold.core.errors import ConfigError
from kvhold.core.secrets import is_secret_name
from kvhold.core.setting import apply


def write(folder: Path, text: str, name: str = "kvhold.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def settings_classes() -> Iterator[type]:
    """Every dataclass of settings: those of the core, and of each tier that can be
    imported here.
    """
    modules = [config_module]
    for found in pkgutil.walk_packages(kvhold.tiers.__path__, "kvhold.tiers."):
        with suppress(ImportError):  # a tier whose library is not installed
            modules.append(importlib.import_module(found.name))
    for module in modules:
        for name, value in vars(module).items():
            if (
                name.endswith("Config")
                and is_dataclass(value)
                and isinstance(value, type)
                and value.__module__ == module.__name__
            ):
                yield value


def refusal(
    arguments: dict[str, Any] | None = None,
    *,
    file: Path | None = None,
    environ: dict[str, str] | None = None,
) -> str:
    """What the loader says when it refuses."""
    with pytest.raises(ConfigError) as error:
        load_config(arguments, file=file, environ=environ or {})
    return str(error.value)


class TestPrecedence:
    def test_with_nothing_said_the_defaults_stand(self) -> None:
        assert load_config(environ={}) == Config()

    def test_arguments_go_over_environment_over_file_over_defaults(self, tmp_path: Path) -> None:
        file = write(
            tmp_path, 'ram_bytes = 1\ncopy_threads = 1\ntokens_per_chunk = 1\npolicy = "s3fifo"'
        )
        environ = {"KVHOLD_RAM_BYTES": "2", "KVHOLD_COPY_THREADS": "2"}
        config = load_config({"ram_bytes": 3}, file=file, environ=environ)
        assert (config.ram_bytes, config.copy_threads, config.tokens_per_chunk, config.policy) == (
            3,
            2,
            1,
            "s3fifo",
        )
        assert config.huge_pages == Config().huge_pages

    def test_a_section_is_merged_setting_by_setting(self, tmp_path: Path) -> None:
        file = write(
            tmp_path,
            '[node]\nsocket = "file"\nidle_exit_s = 10\nautostart = '
            "false\n[client]\ncall_timeout_s = 7",
        )
        config = load_config(
            {"node": {"socket": "argument"}}, file=file, environ={"KVHOLD_NODE_IDLE_EXIT_S": "20"}
        )
        assert (config.node.socket, config.node.idle_exit_s, config.node.autostart) == (
            "argument",
            20,
            False,
        )
        assert config.client.call_timeout_s == 7

    def test_a_default_that_is_named_again_goes_over_the_file(self, tmp_path: Path) -> None:
        file = write(tmp_path, 'policy = "s3fifo"')
        assert load_config({"policy": "lru"}, file=file, environ={}).policy == "lru"

    def test_the_environment_names_the_file(self, tmp_path: Path) -> None:
        file = write(tmp_path, "ram_bytes = 5")
        assert load_config(environ={"KVHOLD_CONFIG": str(file)}).ram_bytes == 5

    def test_a_file_that_the_caller_names_goes_instead_of_that(self, tmp_path: Path) -> None:
        ours, theirs = (
            write(tmp_path, "ram_bytes = 5", "a.toml"),
            write(tmp_path, "copy_threads = 5", "b.toml"),
        )
        config = load_config(file=ours, environ={"KVHOLD_CONFIG": str(theirs)})
        assert (config.ram_bytes, config.copy_threads) == (5, 0)

    def test_the_process_environment_counts_by_default(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("KVHOLD_CONFIG", raising=False)
        monkeypatch.setenv("KVHOLD_TOKENS_PER_CHUNK", "77")
        assert load_config().tokens_per_chunk == 77

    def test_settings_do_not_change_afterwards(self) -> None:
        config = load_config(environ={})
        with pytest.raises(FrozenInstanceError):
            config.ram_bytes = 1  # type: ignore[misc]
        load_config({"node": {"socket": "x"}}, environ={})
        assert Config().node.socket == ""


class TestUnknownNames:
    def test_of_arguments_are_refused_with_the_nearest(self) -> None:
        assert (
            refusal({"ram_byte": 1})
            == "arguments: there is no setting 'ram_byte'; did you mean 'ram_bytes'?"
        )
        assert (
            refusal({"node": {"sockets": "x"}})
            == "arguments: there is no setting 'node.sockets'; did you mean 'node.socket'?"
        )

    def test_of_the_environment_are_refused_with_the_nearest(self) -> None:
        message = refusal(environ={"KVHOLD_RAM_BYTE": "1"})
        assert (
            message == "environment: there is no setting 'KVHOLD_RAM_BYTE'; did you mean "
            "'KVHOLD_RAM_BYTES'?"
        )
        assert "did you mean 'KVHOLD_NODE_SOCKET'?" in refusal(environ={"KVHOLD_NODE_SOCKETS": "x"})

    def test_of_a_file_are_refused_with_the_nearest_and_the_files_name(
        self, tmp_path: Path
    ) -> None:
        file = write(tmp_path, "[client]\ncal_timeout_s = 1")
        assert (
            refusal(file=file)
            == f"{file}: there is no setting 'client.cal_timeout_s'; did you mean "
            "'client.call_timeout_s'?"
        )

    def test_without_a_near_one_all_are_named(self) -> None:
        message = refusal({"zzz": 1})
        assert "known are allow_unproven, blend, clears_file" in message
        assert "tokens_per_chunk" in message

    def test_that_are_no_text_are_refused(self, tmp_path: Path) -> None:
        assert "there is no setting '1'" in refusal(file=write(tmp_path, "1: 2", "kvhold.yaml"))

    def test_a_section_alone_is_no_variable(self) -> None:
        assert "there is no setting 'KVHOLD_NODE'" in refusal(environ={"KVHOLD_NODE": "x"})

    @pytest.mark.parametrize(
        "variable",
        [
            "KVHOLD_CONFIG_FILE",
            "KVHOLD_CONFIGS",
            "KVHOLD_LOG_LEVELS",
            "KVHOLD_",
            "KVHOLD_ram_bytes",
        ],
    )
    def test_a_variable_that_only_begins_like_a_known_one_is_refused(self, variable: str) -> None:
        assert f"there is no setting {variable!r}" in refusal(environ={variable: "x"})

    def test_variables_of_others_and_of_the_installer_are_left_alone(self) -> None:
        others = {
            "RAM_BYTES": "?",
            "KVHOLDER": "?",
            "KVHOLD_SETUP_ANYTHING": "?",
            "KVHOLD_LOG_LEVEL": "DEBUG",
            "KVHOLD_CONFIG": "",
        }
        assert load_config(environ=others) == Config()


class TestBadValues:
    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("ram_bytes", "5 Gigs", "write bytes or a number with a unit, such as 5GiB"),
            ("ram_bytes", -1, "negative"),
            ("ram_bytes", 1.5, "is not a size"),
            ("ram_bytes", True, "is not a size"),
            ("ram_bytes", None, "is not a size"),
            ("tokens_per_chunk", 0, "must be at least 1"),
            ("tokens_per_chunk", "many", "must be a whole number"),
            ("tokens_per_chunk", 2.5, "must be a whole number"),
            ("tokens_per_chunk", "2.5", "must be a whole number"),
            ("tokens_per_chunk", float("inf"), "must be a whole number"),
            ("tokens_per_chunk", float("nan"), "must be a whole number"),
            ("tokens_per_chunk", True, "must be a number"),
            ("tokens_per_chunk", [256], "must be a number"),
            ("copy_threads", -1, "must be at least 0"),
            ("save_decode", "maybe", "must be true or false"),
            ("save_decode", 1, "must be true or false"),
            ("store_tails", "", "must be true or false"),
            ("skip_last_n_tokens", -1, "must be at least 0"),
            ("skip_last_n_tokens", 1.5, "must be a whole number"),
            ("skip_last_n_tokens", True, "must be a number"),
            (
                "policy",
                "lur",
                "must be one of lru, lfu, fifo, mru, s3fifo, learned; did you mean 'lru'?",
            ),
            ("policy", "s3fif", "did you mean 's3fifo'?"),
            ("policy", "", "must be one of lru, lfu"),
            ("policy", 1, "must be text"),
            ("huge_pages", True, "must be text"),
            ("huge_pages", "on", "must be one of auto, never, always"),
        ],
    )
    def test_a_bad_value_is_refused_with_its_name_and_what_is_accepted(
        self, name: str, value: Any, message: str
    ) -> None:
        assert refusal({name: value}).startswith(f"arguments: {name} = {value!r}: ")
        assert message in refusal({name: value})

    @pytest.mark.parametrize(
        ("section", "name", "value", "message"),
        [
            ("node", "autostart", "maybe", "must be true or false"),
            ("node", "autostart", 1, "must be true or false"),
            ("node", "idle_exit_s", 0, "must be at least 1"),
            ("client", "call_timeout_s", "soon", "must be a number"),
            ("client", "call_timeout_s", 0, "must be at least 0.001"),
            ("rules", "max_error", 1.5, "must be at most 1"),
            ("rules", "max_error", "little", "must be a number"),
            ("rules", "max_bits", 65, "must be at most 64"),
            ("client", "call_timeout_s", -1.0, "must be at least 0.001"),
            ("client", "connect_timeout_s", "inf", "must be a finite number"),
            ("client", "connect_timeout_s", float("nan"), "must be a finite number"),
            ("client", "connect_timeout_s", 10**400, "must be a number"),
            ("blend", "separator", 5, "must be a list of whole numbers"),
            ("blend", "separator", [1, "x"], "must be a whole number"),
            ("blend", "separator", "1,2", "must be a whole number"),
            ("blend", "separator", [1, -2], "no number may be negative"),
            ("blend", "ratio", 1.5, "must be at most 1"),
            ("blend", "max_kl", -1, "must be at least 0"),
        ],
    )
    def test_a_bad_value_of_a_section_is_named_with_it(
        self, section: str, name: str, value: Any, message: str
    ) -> None:
        said = refusal({section: {name: value}})
        assert said.startswith(f"arguments: {section}.{name} = ")
        assert message in said

    def test_of_the_environment_is_named_as_it_is_written_there(self) -> None:
        assert refusal(environ={"KVHOLD_RAM_BYTES": ""}).startswith(
            "environment: KVHOLD_RAM_BYTES = '': "
        )
        assert (
            refusal(environ={"KVHOLD_NODE_AUTOSTART": "2"})
            == "environment: KVHOLD_NODE_AUTOSTART = '2': must be true or false"
        )

    @pytest.mark.parametrize("value", ["x", 5, None, ["socket"], True])
    def test_a_section_is_no_value(self, value: Any) -> None:
        assert (
            refusal({"node": value})
            == f"arguments: node is a section of settings, not a {type(value).__name__}"
        )

    def test_a_value_is_no_section(self) -> None:
        assert refusal({"ram_bytes": {"max": 5}}).startswith("arguments: ram_bytes = {'max': 5}: ")


class TestSecrets:
    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("listen.token", 8675309, "must be text"),
            ("listen.token", True, "must be text"),
            ("encryption.keys", 8675309, "must be a list"),
            ("tiers", 8675309, "must be a list"),
            ("tiers", ["redis://:8675309@h a"], "write %20 in a URL"),
            ("tiers", [{"path": "8675309"}], "a table with a url"),
        ],
    )
    def test_no_error_shows_the_value_of_a_secret(
        self, name: str, value: Any, message: str
    ) -> None:
        section, _, leaf = name.rpartition(".")
        said = refusal({section: {leaf: value}} if section else {leaf: value})
        assert said.startswith(f"arguments: {name} = ...: ")
        assert message in said
        assert str(value) not in said
        assert "8675309" not in said

    @pytest.mark.parametrize("section", ["listen", "encryption"])
    def test_a_secret_in_the_place_of_a_section_is_not_shown(self, section: str) -> None:
        assert "hush" not in refusal({section: "hush"})

    def test_broken_yaml_does_not_show_its_lines(self, tmp_path: Path) -> None:
        said = refusal(file=write(tmp_path, "listen:\n  token: hush\n\tx: 1", "k.yaml"))
        assert "in line 3" in said
        assert "hush" not in said

    def test_no_repr_shows_a_secret(self) -> None:
        config = load_config(
            {"listen": {"token": "hush"}, "tiers": ["redis://:hush@h"]}, environ={}
        )
        assert "hush" not in repr(config)

    def test_every_setting_whose_name_says_secret_is_marked_as_one(self) -> None:
        unmarked = {
            f"{owner.__name__}.{f.name}"
            for owner in settings_classes()
            for f in fields(owner)
            if f.type in (str, "str") and is_secret_name(f.name) and not f.metadata.get("secret")
        }
        assert unmarked == set()


class TestKubernetes:
    """The variables that Kubernetes gives to every pod for a Service called `kvhold`, port 6379
    named `http`, and for others.
    """

    SERVICE: ClassVar = {
        "KVHOLD_SERVICE_HOST": "10.96.0.11",
        "KVHOLD_SERVICE_PORT": "6379",
        "KVHOLD_SERVICE_PORT_HTTP": "6379",
        "KVHOLD_PORT": "tcp://10.96.0.11:6379",
        "KVHOLD_PORT_6379_TCP": "tcp://10.96.0.11:6379",
        "KVHOLD_PORT_6379_TCP_PROTO": "tcp",
        "KVHOLD_PORT_6379_TCP_PORT": "6379",
        "KVHOLD_PORT_6379_TCP_ADDR": "10.96.0.11",
        "KVHOLD_PORT_53_UDP_ADDR": "fd00::11",
        "KVHOLD_NODE_SERVICE_HOST": "10.96.0.12",
        "KVHOLD_CENTRAL_STORE_PORT": "tcp://[fd00::12]:7710",
        "KVHOLD_CENTRAL_STORE_PORT_7710_TCP": "tcp://[fd00::12]:7710",
    }

    def test_a_service_called_kvhold_harms_nothing(self) -> None:
        assert load_config(environ=self.SERVICE) == Config()
        assert load_config(environ=self.SERVICE | {"KVHOLD_RAM_BYTES": "5"}).ram_bytes == 5

    @pytest.mark.parametrize(
        ("variable", "value"),
        [
            ("KVHOLD_PORT", "6379"),
            ("KVHOLD_LISTEN_PORT", "7710"),
            ("KVHOLD_SERVICE_HOSTS", "10.0.0.1"),
            ("KVHOLD_SERVICE_HOST", "my-host"),
            ("KVHOLD_PORT_X_TCP_ADDR", "10.0.0.1"),
            ("KVHOLD_SERVICE", "x"),
            ("KVHOLD_SERVICE_RAM_BYTES", "5GiB"),
        ],
    )
    def test_what_only_looks_like_it_is_still_refused(self, variable: str, value: str) -> None:
        assert f"there is no setting {variable!r}" in refusal(environ={variable: value})

    def test_the_documentation_has_the_same_forms(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text().replace("\\|", "|")
        assert [
            form.pattern
            for form, _ in config_module._KUBERNETES
            if f"| `{form.pattern}` |" not in page
        ] == []

    def test_no_setting_has_the_form_of_such_a_variable(self) -> None:
        names = [f"KVHOLD_{name.replace('.', '_').upper()}" for name, _, _ in describe()]
        assert not [
            name
            for name in names
            if any(form.fullmatch(name) for form, _ in config_module._KUBERNETES)
        ]


class TestGoodValues:
    @pytest.mark.parametrize(
        ("value", "num_bytes"),
        [(0, 0), (4096, 4096), ("4096", 4096), ("5GiB", 5 << 30), ("2 GB", 2 * 10**9)],
    )
    def test_sizes(self, value: Any, num_bytes: int) -> None:
        assert load_config({"ram_bytes": value}, environ={}).ram_bytes == num_bytes

    @pytest.mark.parametrize("value", [True, "true", "TRUE", " yes ", "on", "1"])
    def test_true(self, value: Any) -> None:
        assert load_config({"node": {"autostart": value}}, environ={}).node.autostart is True

    @pytest.mark.parametrize("value", [False, "false", "no", "Off", "0"])
    def test_false(self, value: Any) -> None:
        assert load_config({"node": {"autostart": value}}, environ={}).node.autostart is False

    @pytest.mark.parametrize("value", [7, 7.0, "7", " 7 "])
    def test_numbers(self, value: Any) -> None:
        config = load_config(
            {"tokens_per_chunk": value, "client": {"call_timeout_s": value}}, environ={}
        )
        assert (config.tokens_per_chunk, config.client.call_timeout_s) == (7, 7.0)
        assert (type(config.tokens_per_chunk), type(config.client.call_timeout_s)) == (int, float)

    def test_what_of_a_request_is_stored(self) -> None:
        defaults = load_config(environ={})
        assert (defaults.save_decode, defaults.store_tails, defaults.skip_last_n_tokens) == (
            False,
            True,
            0,
        )
        environ = {
            "KVHOLD_SAVE_DECODE": "true",
            "KVHOLD_STORE_TAILS": "no",
            "KVHOLD_SKIP_LAST_N_TOKENS": "8",
        }
        config = load_config(environ=environ)
        assert (config.save_decode, config.store_tails, config.skip_last_n_tokens) == (
            True,
            False,
            8,
        )

    @pytest.mark.parametrize(
        ("value", "most"), [(None, None), ("none", None), ("None", None), (0, 0.0), ("0.5", 0.5)]
    )
    def test_a_budget_may_be_none_which_is_not_0(self, value: Any, most: float | None) -> None:
        found = load_config({"rules": {"max_error": value}}, environ={}).rules.max_error
        assert (found, type(found)) == (most, type(most))

    def test_every_setting_can_come_from_the_environment(self) -> None:
        texts = {
            name: " ".join(default) if isinstance(default, tuple) else str(default)
            for name, default, _ in describe()
        }
        environ = {f"KVHOLD_{name.replace('.', '_').upper()}": text for name, text in texts.items()}
        assert load_config(environ=environ) == Config()
        assert len(environ) == len(list(describe()))

    def test_tiers_are_a_list_or_text_with_blanks_and_their_options_may_stand_in_a_table(
        self, tmp_path: Path
    ) -> None:
        tiers = ("disk:///a%20b?max_bytes=5GiB&sync=true", "redis://h:1/0")
        toml = (
            '[[tiers]]\nurl = "disk:///a%20b"\nmax_bytes = "5GiB"\nsync = true\n[[tiers]]\nurl '
            '= "redis://h:1/0"\n'
        )
        assert load_config(file=write(tmp_path, toml, "k.toml"), environ={}).tiers == tiers
        assert load_config({"tiers": tiers}, environ={}).tiers == tiers
        assert (
            load_config(
                environ={
                    "KVHOLD_TIERS": "  disk:///a%20b?max_bytes=5GiB&sync=true\n redis://h:1/0 "
                }
            ).tiers
            == tiers
        )

    @pytest.mark.parametrize("value", ["7 9", [7, 9], (7, "9")])
    def test_token_ids(self, value: Any) -> None:
        assert load_config({"blend": {"separator": value}}, environ={}).blend.separator == (7, 9)

    def test_every_setting_has_its_help(self) -> None:
        assert all(text for _, _, text in describe())
        assert {"ram_bytes", "node.socket", "client.call_timeout_s"} <= {
            name for name, _, _ in describe()
        }

    def test_any_dataclass_of_settings_can_be_loaded(self) -> None:
        """A tier or a plugin owns its settings and loads them by the same rules."""
        node = apply(Config().node, {"socket": "x"}, source="here")
        assert (node.socket, node.autostart) == ("x", True)


class TestFiles:
    TOML = 'ram_bytes = "1GiB"\npolicy = "s3fifo"\n[node]\nautostart = false\n'
    YAML = "ram_bytes: 1GiB\npolicy: s3fifo\nnode:\n  autostart: false\n"

    @pytest.mark.parametrize(
        ("name", "text"), [("k.toml", TOML), ("k.yaml", YAML), ("k.yml", YAML)]
    )
    def test_toml_and_yaml_say_the_same(self, tmp_path: Path, name: str, text: str) -> None:
        config = load_config(file=write(tmp_path, text, name), environ={})
        assert (config.ram_bytes, config.policy, config.node.autostart) == (
            1 << 30,
            "s3fifo",
            False,
        )

    @pytest.mark.parametrize("name", ["k.toml", "k.yaml"])
    def test_an_empty_file_says_nothing(self, tmp_path: Path, name: str) -> None:
        assert load_config(file=write(tmp_path, "# nothing\n", name), environ={}) == Config()

    def test_a_path_may_be_text(self, tmp_path: Path) -> None:
        assert load_config(file=str(write(tmp_path, self.TOML)), environ={}).ram_bytes == 1 << 30

    @pytest.mark.parametrize("missing", ["no-such-file.toml", "."])
    def test_a_file_that_cannot_be_read_is_refused(self, tmp_path: Path, missing: str) -> None:
        assert refusal(file=tmp_path / missing).startswith(
            f"cannot read the settings file {tmp_path / missing}: "
        )

    def test_a_file_that_the_environment_names_must_be_there(self, tmp_path: Path) -> None:
        assert "cannot read the settings file" in refusal(
            environ={"KVHOLD_CONFIG": str(tmp_path / "gone.toml")}
        )

    def test_a_file_that_is_no_text_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "k.toml"
        path.write_bytes(b"\xff\xfe\x00")
        assert "cannot read the settings file" in refusal(file=path)

    @pytest.mark.parametrize(
        "text",
        ["ram_bytes = ", "ram_bytes = 1\nram_bytes = 2", "ram_bytes: 1", "[node", "x = 2001-99-99"],
    )
    def test_broken_toml_is_refused_by_name(self, tmp_path: Path, text: str) -> None:
        path = write(tmp_path, text)
        assert refusal(file=path).startswith(f"{path} is not valid TOML: ")

    @pytest.mark.parametrize(
        "text",
        [
            "ram_bytes: [1",
            "a: b: c",
            "\tx: 1",
            "x: 2001-99-99",
            "!!python/object:os.system x",
            "x: !own y",
        ],
    )
    def test_broken_yaml_is_refused_by_name(self, tmp_path: Path, text: str) -> None:
        path = write(tmp_path, text, "k.yaml")
        assert refusal(file=path).startswith(f"{path} is not valid YAML: ")

    @pytest.mark.parametrize(
        ("text", "kind"), [("- ram_bytes", "list"), ("5GiB", "str"), ("5", "int")]
    )
    def test_yaml_that_holds_no_names_is_refused(
        self, tmp_path: Path, text: str, kind: str
    ) -> None:
        assert f"must hold names and values, not a {kind}" in refusal(
            file=write(tmp_path, text, "k.yaml")
        )

    @pytest.mark.parametrize("name", ["k.json", "k.conf", "kvhold", "k.TOML.bak"])
    def test_another_kind_of_file_is_refused(self, tmp_path: Path, name: str) -> None:
        assert "ends in .toml, .yaml or .yml" in refusal(file=write(tmp_path, self.TOML, name))

    def test_without_pyyaml_it_says_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "yaml", None)
        assert "pip install 'kvhold[yaml]', or write it as TOML" in refusal(
            file=write(tmp_path, self.YAML, "k.yaml")
        )
