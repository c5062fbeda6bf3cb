from kvhold.codecs.budget import LOSSLESS
from kvhold.codecs.registry import is_lossy
from kvhold.core.config import RulesConfig
from kvhold.core.rules import request_rules


def loss_warning(codec: str, rules: RulesConfig) -> str | None:
    """Why the codec encodes no chunk stored under `rules`."""
    if not is_lossy(codec) or request_rules(None, rules).store_options.allows_loss:
        return None
    return (
        f"codec={codec} loses precision, and these settings allow no loss: chunks that are stored "
        f"under them are encoded by {LOSSLESS}. To use {codec}, set rules.max_error (1: any codec) "
        "or rules.max_bits in the engine's settings; otherwise set codec=lossless"
    )
