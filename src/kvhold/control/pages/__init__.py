from importlib.resources import files

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILES = {
    "/": ("text/html", "dashboard.html"),
    "/dashboard.css": ("text/css", "dashboard.css"),
    "/dashboard.js": ("text/javascript", "dashboard.js"),
}


def read_pages() -> dict[str, tuple[str, bytes]]:
    """{path: (content type, content)}"""
    folder = files(__package__)
    return {
        path: (content_type, (folder / name).read_bytes())
        for path, (content_type, name) in _FILES.items()
    }
