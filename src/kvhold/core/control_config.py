from dataclasses import dataclass

from kvhold.core.setting import setting, size


@dataclass(frozen=True)
class ControlConfig:
    """The HTTP API of this host's node."""

    in_node: bool = setting(
        False, "the node starts the API, as a process that it restarts, and that ends with it"
    )
    listen: str = setting(
        "127.0.0.1:7780",
        "HOST:PORT of the API; beyond the loopback interface, it needs a token, and TLS unless "
        "control.insecure allows clear text. Empty: only the Unix socket",
    )
    socket: str = setting(
        "",
        "path of the API's Unix socket, which only this user can open and which needs no token; "
        "empty: control.sock beside the node's socket",
    )
    read_token_file: str = setting(
        "",
        "file with the token of the role read. Empty: on the loopback interface, every user of "
        "this host may read",
    )
    operate_token_file: str = setting("", "file with the token of the role operate")
    administer_token_file: str = setting("", "file with the token of the role administer")
    tenant_read_token_files: tuple[str, ...] = setting(
        (),
        "files with tokens that only read what belongs to their tenant: a table of TENANT = PATH, "
        "or TENANT=PATH with spaces between. Loopback then needs a token, too",
        pairs=True,
    )
    tenant_operate_token_files: tuple[str, ...] = setting(
        (), "the same for tokens that operate", pairs=True
    )
    tls_cert: str = setting("", "PEM file of the API's certificate; clients must then use TLS")
    tls_key: str = setting(
        "", "PEM file of the certificate's key; empty: the key is in control.tls_cert"
    )
    tls_client_ca: str = setting(
        "", "PEM file of the authorities that sign clients' certificates (mTLS)"
    )
    certificate_role: str = setting(
        "none",
        "role of a client whose certificate control.tls_client_ca accepts, without a token",
        choices=("none", "read", "operate", "administer"),
    )
    insecure: bool = setting(
        False, "listen beyond loopback without TLS: others on the network can read the tokens"
    )
    node_timeout_s: float = setting(
        5.0, "how long a request waits for the node's answer", minimum=0.01
    )
    nice: int = setting(
        10, "nice value of the API's process: engines and the node go first", minimum=0, maximum=19
    )
    max_running: int = setting(
        8, "requests to the node at once; as many again wait, and more are refused", minimum=1
    )
    max_body_bytes: int = size(16 << 20, "larger requests are refused with status 413")
    history_file: str = setting(
        "",
        "file for the past of the metrics, at most some 100 MB; empty: one for this node in "
        "$XDG_STATE_HOME/kvhold",
    )
    history_interval_s: float = setting(
        10.0, "seconds between two samples of the metrics; 0: no history", minimum=0
    )
    tokenizers: tuple[str, ...] = setting(
        (),
        "tokenizers of prompts that are given as text or messages: a table of MODEL = PATH, or "
        "MODEL=PATH with spaces between. MODEL: as `kvhold names` shows it, or at least the first "
        "4 digits of a namespace; PATH: the model's folder, or its tokenizer.json",
        pairs=True,
    )
    max_pinned_bytes: int = size(
        0, "most bytes of chunks that the API pins; 0: a quarter of the node's memory"
    )
