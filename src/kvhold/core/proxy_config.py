from dataclasses import dataclass

from kvhold.core.setting import setting, size


@dataclass(frozen=True)
class ProxyConfig:
    """An OpenAI-compatible front for prefill and decode engines."""

    listen: str = setting(
        "127.0.0.1:8090",
        "HOST:PORT to listen on; beyond the loopback interface, an API key is required",
    )
    prefill: tuple[str, ...] = setting(
        (),
        "base URLs of the engines that only compute prompts, such as http://127.0.0.1:8100; with "
        "the protocol p2p, each with the option `p2p`: http://10.0.0.1:8100?p2p=10.0.0.1:7777",
    )
    decode: tuple[str, ...] = setting((), "base URLs of the engines that answer; at least one")
    protocol: str = setting(
        "shared",
        "how the KV of a prompt is handed over. shared: both engines use one kvhold node, or "
        "share tiers or peers; nixl: the fields of vLLM's NixlConnector; p2p: both engines get "
        "the request at once",
        choices=("shared", "nixl", "p2p"),
    )
    min_prefill_tokens: int = setting(
        256,
        "shorter prompts go to a decode engine alone. The length of a text is taken as its number "
        "of bytes, which is the most that it can have in tokens",
        minimum=0,
    )
    skip_answered_s: float = setting(
        300.0,
        "for this time after a decode engine's answer, prompts that go on from the answered one "
        "with fewer than min_prefill_tokens tokens (4 bytes of text each) go to a decode engine "
        "alone; 0: never, for decode engines that share no KV",
        minimum=0,
    )
    session_header: str = setting(
        "X-Session-ID",
        "header that names the session of a request; without it, the fields session_id, "
        "prompt_cache_key and user do. A session stays with its engines",
    )
    session_slack: int = setting(
        8,
        "a session leaves its engine for this request if that runs so many more requests than the "
        "engine with the fewest",
        minimum=0,
    )
    api_key: str = setting("", "the key that clients must send; prefer api_key_file", secret=True)
    api_key_file: str = setting("", "file that holds the key that clients must send")
    engine_api_key_file: str = setting(
        "", "file with the key that engines get; empty: they get the client's headers"
    )
    admin_key_file: str = setting(
        "",
        "file with the key for draining and resuming engines; empty: only a proxy that listens on "
        "loopback allows it",
    )
    tls_cert: str = setting("", "PEM file of the proxy's certificate; clients must then use TLS")
    tls_key: str = setting(
        "", "PEM file of the certificate's key; empty: the key is in proxy.tls_cert"
    )
    engine_ca_file: str = setting(
        "", "PEM file of the authorities of https:// engines; empty: the system's"
    )
    max_running: int = setting(
        256, "requests that run at once, for each usable decode engine", minimum=1
    )
    max_queued: int = setting(
        256, "requests that wait for a decode engine; more are refused with status 503", minimum=0
    )
    queue_timeout_s: float = setting(
        30.0, "a request that waits longer for a decode engine is refused", minimum=0.001
    )
    max_attempts: int = setting(
        3, "engines that are tried for each part of a request, before its first byte", minimum=1
    )
    chat: bool = setting(
        False,
        "serve the page /chat, which shows how much of each prompt came from the cache; the page "
        "needs no key, but its requests do",
    )
    cache_settings: bool = setting(
        True,
        "carry out cache_control, prompt_cache_options and prompt_cache_retention of clients, as "
        "hints to engines, and make usage reconcile with what engines computed",
    )
    max_body_bytes: int = size(32 << 20, "larger requests are refused with status 413")
    max_held_bytes: int = size(
        1 << 30, "requests are refused while the bodies of others take this much memory"
    )
    max_header_bytes: int = size(
        16 << 10, "larger header lines of clients and engines are refused; there may be 128 lines"
    )
    connect_timeout_s: float = setting(5.0, "how long to connect to an engine", minimum=0.001)
    prefill_timeout_s: float = setting(
        60.0,
        "after this time without the prefill engine's answer, the decode engine computes the "
        "prompt",
        minimum=0.001,
    )
    first_byte_timeout_s: float = setting(
        600.0,
        "how long to wait for the first byte of an answer; one that is not streamed comes as a "
        "whole",
        minimum=0.001,
    )
    idle_timeout_s: float = setting(
        300.0, "how long to wait for the next bytes of an answer", minimum=0.001
    )
    client_timeout_s: float = setting(
        60.0,
        "how long a client may take to send its request, or not read its answer; then its "
        "connection is closed",
        minimum=0.001,
    )
    drain_timeout_s: float = setting(
        60.0, "how long running requests may go on after SIGTERM", minimum=0
    )
    probe_path: str = setting("/health", "path that tells whether an engine is healthy")
    probe_interval_s: float = setting(
        2.0, "seconds between the probes of a healthy engine", minimum=0.01
    )
    probe_timeout_s: float = setting(5.0, "how long a probe may take", minimum=0.01)
    probe_failures: int = setting(
        3,
        "an engine is not used after so many failed probes in a row, or after one that it refused",
        minimum=1,
    )
    probe_max_interval_s: float = setting(
        30.0,
        "longest time between probes of an engine that is not used; it doubles with each failure",
        minimum=0.01,
    )
    paths: tuple[str, ...] = setting(
        (
            "/v1/",
            "/v2/",
            "/tokenize",
            "/detokenize",
            "/rerank",
            "/score",
            "/classify",
            "/pooling",
            "/inference/v1/generate",
            "/version",
        ),
        "paths that engines serve to clients; one with a / at its end includes all below it",
    )
