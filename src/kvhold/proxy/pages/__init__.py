"""The chat: one page."""

FILES = {
    "/chat": ("text/html", "chat.html"),
    "/chat.css": ("text/css", "chat.css"),
    "/chat.js": ("text/javascript", "chat.js"),
}
