import click

from kvhold.core.sizes import format_size
from kvhold.tiers.registry import tier_options, tier_schemes


@click.command()
@click.argument("scheme", required=False)
def command(scheme: str | None) -> None:
    """List the tiers; or the options of one SCHEME, as they stand after the ? of its URL."""
    if scheme is None:
        click.echo(f"{', '.join(tier_schemes())}\n\nin every tier's URL:")
        _show("")
    else:
        _show(scheme)


def _show(scheme: str) -> None:
    for name, default, help in tier_options(scheme):
        is_size = isinstance(default, int) and not isinstance(default, bool) and default >= 1 << 20
        shown = (
            format_size(default)
            if is_size and isinstance(default, int)
            else ""
            if default in ("", ())
            else str(default).lower()
        )
        click.echo(f"  {name:22} {shown:10} {help}")
