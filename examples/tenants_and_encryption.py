"""Two tenants share a cache and an encrypted disk tier. Neither can read the other's KV.

    python examples/tenants_and_encryption.py    # needs kvhold[encryption]

A tenant is a tag in the namespace, so tenants' chunks have different names. Below memory, frames
are encrypted with their tenant's key, a file that the settings name.
"""

import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import kvhold
from kvhold.core.keys import Namespace
from kvhold.core.store_options import StoreOptions

GROUP = kvhold.Group(layers=2, planes=2, heads=2, head_dim=64, dtype="float32")
LAYOUT = kvhold.Layout(groups=(GROUP,), tokens_per_chunk=128)
TOKENS = np.arange(256)  # of both tenants
SECRET = b"what acme's prompt says"


def main() -> None:
    shared = kvhold.Namespace(model="my-model", layout=LAYOUT)
    acme, other = (replace(shared, tags=(("tenant", name),)) for name in ("acme", "other"))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = [f"{tenant}=file:{key_file(folder, tenant)}" for tenant in ("acme", "other")]
        with open_cache(folder, keys) as cache:
            for tenant in (acme, other):
                cache.register(tenant)
            store(cache, acme)
            print(f"acme finds {found_tokens(cache, acme)} tokens of its prompt")
            print(f"other finds {found_tokens(cache, other)} tokens of the same prompt")
            cache.flush()

        files = [file.read_bytes() for file in (folder / "kv").rglob("*") if file.is_file()]
        print(
            f"the disk has {sum(map(len, files))} bytes; acme's text in clear: "
            f"{any(SECRET in data for data in files)}"
        )

        # A restart: memory is empty; the keys decide who reads the disk.
        with open_cache(folder, keys) as cache:
            cache.register(acme)
            print(f"after a restart, acme finds {found_tokens(cache, acme)} tokens")
        # A cache that knows acme's names, and has only the other tenant's key.
        with open_cache(folder, [f"acme=file:{folder / 'other.key'}"]) as cache:
            cache.register(acme)
            print(f"with the other tenant's key, {found_tokens(cache, acme)} tokens")


def key_file(folder: Path, tenant: str) -> Path:
    file = folder / f"{tenant}.key"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))  # as from `openssl rand -hex 32`
    return file


def open_cache(folder: Path, keys: Sequence[str]) -> kvhold.LocalCache:
    return kvhold.open_cache(
        ram_bytes="64MiB",
        tiers=[f"disk://{folder}/kv?max_bytes=1GiB&encrypt=true"],
        encryption={"keys": keys},
    )


def store(cache: kvhold.LocalCache, namespace: Namespace) -> None:
    options = StoreOptions(tenant=namespace.tenant)
    names = namespace.prompt(TOKENS).chunks()
    with cache.reserve(LAYOUT, names, store_options=options) as reservation:
        for at in map(int, reservation.chunks().offsets[reservation.granted]):
            reservation.buffer[at : at + LAYOUT.whole_bytes] = 0
            reservation.buffer[at : at + len(SECRET)] = np.frombuffer(SECRET, np.uint8)
        reservation.commit()


def found_tokens(cache: kvhold.LocalCache, namespace: Namespace) -> int:
    with cache.lookup(namespace.prompt(TOKENS).query()) as hit:
        return hit.num_tokens


if __name__ == "__main__":
    main()
