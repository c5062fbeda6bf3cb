from pathlib import Path

from kvhold.blend.permits import Permit, Permits, now


def grant_trial(folder: Path, model: str, selector: str) -> None:
    """A permit without a measurement, for runs that measure."""
    Permits(folder).grant(
        Permit(
            model=model,
            selector=selector,
            data="none",
            prompts=1,
            f1=1,
            f1_full=1,
            f1_low=0,
            f1_high=0,
            exact_match=1,
            exact_match_full=1,
            kl=0,
            kl_high=0,
            kl_usual=0,
            max_f1_loss=0,
            max_kl=None,
            granted=now(),
            version="trial",
        )
    )
