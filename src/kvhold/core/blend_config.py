from dataclasses import dataclass

from kvhold.core.setting import setting


@dataclass(frozen=True)
class BlendConfig:
    """Reuse of text that is not a prefix. Not exact."""

    selector: str = setting(
        "off",
        "which tokens of reused spans are recomputed; off: no spans are reused",
        choices=("off", "deviation", "first", "query", "none"),
    )
    ratio: float | None = setting(
        None,
        "share of the reused tokens to recompute, from 0 to 1; give this or blend.bound",
        minimum=0,
        maximum=1,
    )
    bound: float | None = setting(
        None, "tokens with a higher score are recomputed (deviation, query)", minimum=0
    )
    check_layer: int = setting(
        1, "layer whose stored and computed KV are compared (deviation)", minimum=0
    )
    separator: tuple[int, ...] = setting(
        (), "token ids between spans; empty: only spans that requests mark"
    )
    permits: str = setting(
        "",
        "folder of permits, which `kvhold verify --blend` writes; empty: "
        "$XDG_DATA_HOME/kvhold/permits",
    )
    canary_share: float = setting(
        0.01,
        "share of blended requests that are computed in full, too, and compared",
        minimum=0,
        maximum=1,
    )
    max_f1_loss: float = setting(
        0.01, "largest loss of F1 that a permit allows", minimum=0, maximum=1
    )
    max_kl: float | None = setting(
        None,
        "largest mean KL divergence of next tokens that a permit allows, in nats; none: any",
        minimum=0,
    )
