"""The settings. Arguments override the environment, then a file, then the defaults.

    config = load_config({"ram_bytes": "8GiB"})  # or KVHOLD_RAM_BYTES=8GiB, or ram_bytes = "8GiB"
    config.node.socket                           # or KVHOLD_NODE_SOCKET, or [node] socket

The file is TOML or YAML. A list may be text with spaces between items. An item with options may be
a table: `{url = "disk:///var/cache/kvhold", max_bytes = "100GiB"}`. Errors never contain `secret`
values.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from kvhold.core.blend_config import BlendConfig
from kvhold.core.control_config import ControlConfig
from kvhold.core.errors import ConfigError
from kvhold.core.events_config import EventsConfig
from kvhold.core.hints_config import HintsConfig
from kvhold.core.otel_config import OtelConfig
from kvhold.core.proxy_config import ProxyConfig
from kvhold.core.setting import apply, setting, size, unknown_setting
from kvhold.core.store_options import MAX_BITS

MOST_HANDOVER_S = 600.0

_PREFIX = "KVHOLD_"
_NOT_SETTINGS = ("KVHOLD_CONFIG", "KVHOLD_LOG_LEVEL")
_INSTALLER = "KVHOLD_SETUP_"
_SERVICE = r"KVHOLD(_[A-Z0-9]+)*"  # a Service named kvhold or kvhold-...
_KUBERNETES = (  # variables that Kubernetes sets for such a Service: name, value
    (re.compile(rf"{_SERVICE}_SERVICE_HOST"), re.compile(r"[0-9a-fA-F:.]*")),
    (re.compile(rf"{_SERVICE}_SERVICE_PORT(_[A-Z0-9_]+)?"), re.compile(r"\d+")),
    (re.compile(rf"{_SERVICE}_PORT(_\d+_(TCP|UDP|SCTP))?"), re.compile(r"(tcp|udp|sctp)://.+")),
    (re.compile(rf"{_SERVICE}_PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)"), re.compile(r".*")),
)


@dataclass(frozen=True)
class NodeConfig:
    socket: str = setting(
        "", "path of the node's Unix socket; empty: one for this user in the runtime directory"
    )
    autostart: bool = setting(True, "start a node when none answers")
    start_timeout_s: float = setting(
        60.0,
        "how long an engine waits for a node to start; it stops waiting at once if the node ends",
        minimum=0.01,
    )
    any_owner: bool = setting(
        False,
        "allow a socket folder that other users own or can write to, such as a pod's emptyDir",
    )
    on_mismatch: str = setting(
        "warn",
        "what an engine does if the node lacks tiers, codecs or keys of its settings. "
        "warn: join with a warning; refuse: do not join. It never joins a node that would store "
        "in clear text what its settings encrypt",
        choices=("warn", "refuse"),
    )
    require_encryption: bool = setting(
        False, "an engine joins a node only if all tiers below memory are encrypted"
    )
    idle_exit_s: float = setting(
        600.0, "a node that an engine started exits after this time without clients", minimum=1
    )
    nice: int = setting(
        -5,
        "nice value of a background node, if this user may set it",
        minimum=-20,
    )
    numa: str = setting(
        "spread",
        "NUMA nodes for the cached KV. spread: all of them; near: chunks near the GPU that stores "
        "them; engine: those of the engine that starts the node; or a list such as 0,1",
    )
    environment: tuple[str, ...] = setting(
        (), "names of more environment variables that a node takes from the engine that starts it"
    )
    log_bytes: int = size(
        10 << 20, "the log file of a node that an engine started is rotated at this size"
    )
    log_files: int = setting(3, "number of log files to keep, including the current one", minimum=1)
    reservation_timeout_s: float = setting(
        60.0,
        "after this time, another engine may write the chunks that one engine reserved and has "
        "not written; it gets other memory",
        minimum=0.01,
    )


@dataclass(frozen=True)
class ClientConfig:
    connect_timeout_s: float = setting(
        5.0, "how long a client waits for a running node's answer when it joins", minimum=0.01
    )
    call_timeout_s: float = setting(
        1.0, "deadline of one call; after it the engine computes without the cache", minimum=0.001
    )
    arrival_timeout_s: float = setting(
        10.0, "how long a request waits for chunks from lower tiers", minimum=0
    )
    handover_timeout_s: float = setting(
        30.0,
        "how long a request of a decode engine waits for KV that its prefill engine still computes "
        "or stores; after it the decode engine computes. A prefill engine's KV stays in memory for "
        "as long, unless it is read before (vLLM)",
        minimum=0,
        maximum=MOST_HANDOVER_S,
    )
    handover_grace_s: float = setting(
        1.0,
        "how long it waits for the prefill engine to begin, if both get the request at the same "
        "time, as with the proxy's protocol p2p (vLLM)",
        minimum=0,
        maximum=MOST_HANDOVER_S,
    )
    reconnect_interval_s: float = setting(
        1.0, "seconds between attempts to rejoin a lost node, in the background", minimum=0.01
    )
    check_memory: bool = setting(
        True,
        "compare chunks read from memory with their checksums; turn it off only to measure its "
        "cost",
    )
    heartbeat_interval_s: float = setting(
        2.0, "seconds between heartbeats on an idle connection", minimum=0.05
    )
    cores: str = setting(
        "",
        "cores for kvhold's threads in an engine, such as 8-15; empty: cores to which the engine "
        "binds no thread; inherit: the engine's cores",
    )


@dataclass(frozen=True)
class LoginConfig:
    """How the clients of a TCP server log in, and how many it serves."""

    token: str = setting("", "the secret that clients must send; prefer token_file", secret=True)
    token_file: str = setting("", "file that holds the token")
    tls_cert: str = setting("", "PEM file of the server's certificate; clients must then use TLS")
    tls_key: str = setting("", "PEM file of the certificate's key; empty: the key is in tls_cert")
    tls_client_ca: str = setting(
        "", "PEM file of the authorities that sign clients' certificates (mTLS)"
    )
    insecure: bool = setting(
        False,
        "listen beyond loopback with a token and without TLS: anyone who can read the network "
        "traffic sees the token and the KV",
    )
    max_connections: int = setting(256, "connections at once", minimum=1)
    request_timeout_s: float = setting(
        60.0,
        "a request that takes longer ends its connection, for example if the client does not read",
        minimum=0.1,
    )


@dataclass(frozen=True)
class ListenConfig(LoginConfig):
    """A central cache."""

    address: str = setting(
        "",
        "HOST:PORT to listen on; beyond the loopback interface, a token or client certificates "
        "are required",
    )
    max_value_bytes: int = size(1 << 30, "larger values are refused")


@dataclass(frozen=True)
class ServePeersConfig(LoginConfig):
    """A node that serves its chunks to other hosts' nodes, or reads theirs."""

    listen: str = setting(
        "",
        "HOST:PORT on which this node serves its chunks to other nodes (tier peers://); beyond "
        "the loopback interface, a token or client certificates are required; empty: it serves "
        "none",
    )
    advertise: str = setting(
        "",
        "HOST:PORT by which other nodes reach this one, as the tier peers-etcd:// registers it; "
        "empty: `peers.listen`",
    )
    channel: str = setting(
        "tcp",
        "how chunks in memory go to other nodes and come from them. auto: by NIXL where both nodes "
        "allow it and a measurement finds it faster, but not with TLS; nixl: wherever both nodes "
        "allow it; both fall back to TCP. NIXL does not encrypt, and its ports have no login",
        choices=("tcp", "auto", "nixl"),
    )
    in_flight_bytes: int = size(
        256 << 20,
        "most bytes of chunks that are pinned, or read from disks, while they are sent to peers",
    )
    bytes_per_s: int = size(
        0,
        "most bytes of chunks a second for all peers together, in equal parts; at least 1 MiB; 0: "
        "no limit",
    )
    last_copies: bool = setting(
        False,
        "evict chunks from memory first that nodes of the tier peers:// have, too; one of the "
        "nodes with a prompt keeps it longer",
    )


@dataclass(frozen=True)
class SpanConfig(LoginConfig):
    """An engine whose workers are on several hosts."""

    listen: str = setting(
        "",
        "HOST:PORT on which the workers of an engine on several hosts relay its lookups to their "
        "host's node; auto: this host's address as vLLM knows it, and any free port; empty: such "
        "an engine is refused. Beyond the loopback interface, TLS is required, unless "
        "span.insecure is set (vLLM)",
    )
    token: str = setting(
        "",
        "the secret that the scheduler must send; the workers tell it over vLLM's own "
        "connections; empty: a random one",
        secret=True,
    )
    max_connections: int = setting(8, "connections at once", minimum=1)
    ca_file: str = setting(
        "", "PEM file of the authorities of the relays' certificates; empty: the system's"
    )
    cert_file: str = setting("", "PEM file of the scheduler's certificate, if relays require one")
    key_file: str = setting("", "PEM file of its key; empty: the key is in cert_file")


@dataclass(frozen=True)
class RulesConfig:
    """The rules for all requests. A request may ask for less."""

    store: bool = setting(True, "store the KV of requests")
    load: bool = setting(True, "load cached KV")
    plan: bool = setting(
        False,
        "load only where measured times say that loading is faster than computing; off: load the "
        "whole hit (vLLM)",
    )
    wait_for_computing: bool = setting(
        False,
        "wait for KV that another engine of this host computes now, where measured times say that "
        "this is faster than computing it, and let other engines wait for this one (vLLM)",
    )
    ttl_s: float = setting(0.0, "stored KV is not used after this time; 0: no limit", minimum=0)
    max_error: float | None = setting(
        None,
        "largest error of the tiers' codecs: |decoded - original| over the largest |original| of "
        "a layer. 1: as the codecs state; 0: no loss; none: no loss, but for max_bits, and for "
        "requests that allow it. Engines with a loss share KV only if they allow the same",
        minimum=0,
        maximum=1,
    )
    max_bits: float = setting(
        0.0,
        "most bits per element that lossy codecs use, if max_error allows. It allows a loss, as "
        "the codecs state, if max_error is none; 0: no limit",
        minimum=0,
        maximum=MAX_BITS,
    )
    tenant: str = setting(
        "",
        "owner of the KV; the owner's key encrypts it below memory. A request whose tag `tenant` "
        "names another one is not cached; empty: the tag decides",
    )


@dataclass(frozen=True)
class EncryptionConfig:
    """AES-256-GCM below memory, for tiers with the option `encrypt`."""

    keys: tuple[str, ...] = setting(
        (),
        "TENANT=file:PATH or TENANT=env:NAME, each a key of 32 bytes; with no tenant before the "
        "=, the key of all tenants that have none",
        secret=True,
    )


@dataclass(frozen=True)
class Config:
    tokens_per_chunk: int = setting(
        128, "tokens in a chunk; engines round it up to a multiple of their block", minimum=1
    )
    head_shards: int = setting(
        0,
        "number of shards into which the heads are divided; engines with different numbers of "
        "tensor parallel workers can then share KV; 0: one per worker",
    )
    save_decode: bool = setting(
        False,
        "also store generated tokens, so that the next turn of a conversation finds them (vLLM)",
    )
    store_tails: bool = setting(
        True,
        "also store the blocks after the last whole chunk, of a prompt and of generated tokens "
        "(vLLM)",
    )
    layerwise: bool = setting(
        False,
        "load and store one layer at a time inside the engine's forward passes, not during and "
        "after them (vLLM)",
    )
    memory_codec: str = setting(
        "none",
        "int8: chunks take half the memory, and half the bytes cross the bus to a device; each "
        "element loses up to 1/127 of the largest of the (at most 128) elements that share its "
        "scale. none: no loss (vLLM)",
        choices=("none", "int8"),
    )
    allow_unproven: bool = setting(
        False,
        "serve engines whose answers have not been shown to be exact: on GPUs if the check at "
        "start passes (vLLM: beyond what ran on one), with MLA on CPUs, and with some drafters "
        "(vLLM)",
    )
    skip_last_n_tokens: int = setting(
        0,
        "number of last tokens that are neither stored nor looked up: of the prompt, or with "
        "save_decode of all tokens so far (vLLM)",
        minimum=0,
    )
    model_id: str = setting(
        "",
        "name of the model and its weights, if neither their content nor a hub commit identifies "
        "them",
    )
    share: tuple[str, ...] = setting(
        (),
        "differences to ignore, so that these engines share KV: versions, cpu, tensor_parallel, "
        "data_parallel, expert_parallel, environment, or a fact that `kvhold names A B` shows",
    )
    ram_bytes: int = size(
        0, "memory for cached KV; 0: a quarter of the free memory at start, at most 4 GiB"
    )
    policy: str = setting(
        "lru",
        "which chunk is evicted first",
        choices=("lru", "lfu", "fifo", "mru", "s3fifo", "learned"),
    )
    policy_for: str = setting(
        "tokens",
        "what the policy `learned` maximises. tokens: tokens found. ttft: seconds saved; a chunk "
        "counts more late in its prompt, and less if a lower tier loads it fast. bytes: bytes "
        "not computed again",
        choices=("tokens", "ttft", "bytes"),
    )
    namespace_quota_bytes: int = size(0, "most memory for the chunks of one namespace; 0: no limit")
    huge_pages: str = setting(
        "auto", "huge pages for the arena", choices=("auto", "never", "always")
    )
    tiers: tuple[str, ...] = setting(
        (),
        "tiers below RAM, the fastest first: URLs such as disk:///var/cache/kvhold",
        secret=True,
    )
    plugins: tuple[str, ...] = setting(
        (), "third-party tiers that may be loaded: names of entry points, or module:Class"
    )
    write_behind_bytes: int = size(
        0,
        "most bytes of chunks that wait to be written to lower tiers; chunks beyond it are "
        "dropped; 0: a quarter of RAM",
    )
    event_buffer: int = setting(
        0,
        "number of latest events to keep for routers and other indexes; 0: no events",
        minimum=0,
    )
    clears_file: str = setting(
        "",
        "file that keeps the pending clears of tiers; a node's default is in "
        "$XDG_STATE_HOME/kvhold",
    )
    scrub_interval_s: float = setting(
        3600.0,
        "seconds in which all idle chunks in memory are compared with their checksums once; 0: "
        "never",
        minimum=0,
    )
    drain_timeout_s: float = setting(
        5.0, "how long a closing cache continues to write waiting chunks to tiers", minimum=0
    )
    copy_threads: int = setting(
        0,
        "threads that copy between engine and arena, or compute the checksums of a device's "
        "copies; 0: 2, or with a device half of the cores, at most 8",
        minimum=0,
    )
    node: NodeConfig = field(default_factory=NodeConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    rules: RulesConfig = field(default_factory=RulesConfig)
    hints: HintsConfig = field(default_factory=HintsConfig)
    blend: BlendConfig = field(default_factory=BlendConfig)
    listen: ListenConfig = field(default_factory=ListenConfig)
    peers: ServePeersConfig = field(default_factory=ServePeersConfig)
    span: SpanConfig = field(default_factory=SpanConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    otel: OtelConfig = field(default_factory=OtelConfig)
    encryption: EncryptionConfig = field(default_factory=EncryptionConfig)


def load_config(
    arguments: Mapping[str, Any] | None = None,
    *,
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    environ = os.environ if environ is None else environ
    config = Config()
    path = file or environ.get("KVHOLD_CONFIG")
    if path:
        config = apply(config, read_settings(Path(path)), source=str(path))
    config = apply(config, _from_environ(environ), source="environment", spell=_env_name)
    return apply(config, arguments or {}, source="arguments")


def describe(section: Any = Config, path: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield dotted name, default and help of every setting."""
    for f in fields(section):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if is_dataclass(default):
            yield from describe(default, f"{path}{f.name}.")
        else:
            yield f"{path}{f.name}", default, f.metadata["help"]


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    names = {_env_name(name): name for name, _, _ in describe()}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if (
            not variable.startswith(_PREFIX)
            or variable.startswith(_INSTALLER)
            or variable in _NOT_SETTINGS
        ):
            continue
        if variable not in names:
            if _is_of_kubernetes(variable, text):
                continue
            raise unknown_setting(variable, list(names), "environment")
        *sections, leaf = names[variable].split(".")
        target = values
        for section in sections:
            target = target.setdefault(section, {})
        target[leaf] = text
    return values


def _is_of_kubernetes(variable: str, text: str) -> bool:
    """Others, such as a misspelt `KVHOLD_LISTEN_PORT=7710`, are reported."""
    return any(name.fullmatch(variable) and value.fullmatch(text) for name, value in _KUBERNETES)


def _env_name(dotted: str) -> str:
    return _PREFIX + dotted.replace(".", "_").upper()


def read_settings(path: Path) -> dict[str, Any]:
    """TOML or YAML. Raises ConfigError."""
    try:
        raw = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the settings file {path}: {error}") from None
    if path.suffix == ".toml":
        try:
            return tomllib.loads(raw)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    if path.suffix in (".yaml", ".yml"):
        return _read_yaml(path, raw)
    raise ConfigError(f"{path}: a settings file ends in .toml, .yaml or .yml")


def _read_yaml(path: Path, raw: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"{path} is YAML, which needs PyYAML: pip install 'kvhold[yaml]', or write it as TOML"
        ) from None
    try:
        values = yaml.safe_load(raw)
    except yaml.MarkedYAMLError as error:  # its text quotes secrets
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(
            f"{path} is not valid YAML: {error.problem or error.context}{line}"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {type(error).__name__}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: the file must hold names and values, not a {type(values).__name__}"
        )
    return values
