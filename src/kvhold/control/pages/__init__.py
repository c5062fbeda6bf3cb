FILES = {
    "/": ("text/html", "dashboard.html"),
    "/dashboard.css": ("text/css", "dashboard.css"),
    "/dashboard.js": ("text/javascript", "dashboard.js"),
}
