"""Pages of a package, served without outside resources."""

from collections.abc import Mapping
from importlib.resources import files

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


def read_pages(package: str, names: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, bytes]]:
    """names: content type and file name, by path. Return content type and content, by path."""
    folder = files(package)
    return {
        path: (content_type, (folder / name).read_bytes())
        for path, (content_type, name) in names.items()
    }
