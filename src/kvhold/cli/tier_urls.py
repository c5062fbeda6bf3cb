from collections.abc import Sequence

from kvhold.core.errors import ConfigError
from kvhold.tiers.url import parse_url


def check_no_secrets(tiers: Sequence[str]) -> None:
    """Raises ConfigError for a secret in a URL: every user can read a command line (`ps`)."""
    for text in tiers:
        if (url := parse_url(text)).has_secret:
            raise ConfigError(
                f"--tier {url.shown}: every user of this host can read a command line; "
                "name the secret instead, as in "
                f"'redis://user:${{env:REDIS_PASSWORD}}@host' or "
                f"'redis://:${{file:/etc/kvhold/password}}@host', "
                f"or put the URL into the settings file or KVHOLD_TIERS"
            )
