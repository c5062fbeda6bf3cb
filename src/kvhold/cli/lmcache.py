"""Map LMCache's settings to kvhold's."""

from collections.abc import Iterator, Mapping

_PREFIX = "LMCACHE_"
_NAMES = {
    "CHUNK_SIZE": "KVHOLD_TOKENS_PER_CHUNK",
    "LOCAL_CPU": "nothing: memory is always used (KVHOLD_RAM_BYTES is its size)",
    "MAX_LOCAL_CPU_SIZE": "KVHOLD_RAM_BYTES, with a unit",
    "LOCAL_DISK": "KVHOLD_TIERS=disk:///PATH",
    "MAX_LOCAL_DISK_SIZE": "the option max_bytes of the tier disk",
    "REMOTE_URL": "KVHOLD_TIERS, one URL per tier",
    "REMOTE_SERDE": "the option codec of a tier",
    "SAVE_DECODE_CACHE": "KVHOLD_SAVE_DECODE",
    "SAVE_UNFULL_CHUNK": "KVHOLD_STORE_TAILS",
    "USE_LAYERWISE": "KVHOLD_LAYERWISE",
    "CACHE_POLICY": "KVHOLD_POLICY",
    "CONFIG_FILE": "KVHOLD_CONFIG, a settings file of kvhold",
}


def advice(environ: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environ):
        if name.startswith(_PREFIX):
            here = _NAMES.get(
                name.removeprefix(_PREFIX),
                "in docs/tiers.md and `kvhold serve --help`, if there is such a setting",
            )
            yield f"{name} is a variable of LMCache and has no effect here; in kvhold it is {here}"
