import re
from http import HTTPStatus
from typing import Any

import msgspec

from kvhold import __version__
from kvhold.control.access import ControlRole
from kvhold.control.route import Route
from kvhold.control.routes import ROUTES

_PROBLEM = {
    "description": "An error.",
    "content": {
        "application/problem+json": {
            "schema": {
                "type": "object",
                "properties": {
                    "title": {"type": "string"},
                    "status": {"type": "integer"},
                    "reason": {"type": "string"},
                    "detail": {"type": "string"},
                },
            }
        }
    },
}


def document() -> dict[str, Any]:
    types = [route.answer for route in ROUTES]
    types += [route.body for route in ROUTES if route.body is not None]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    answers = schemas[: len(ROUTES)]
    bodies = dict(
        zip((route.name for route in ROUTES if route.body is not None), schemas[len(ROUTES) :],
            strict=True)
    )  # fmt: skip
    paths: dict[str, Any] = {
        "/metrics": {"get": _metrics()},
    }
    for route, answer in zip(ROUTES, answers, strict=True):
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(
            route, answer, bodies.get(route.name)
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvhold",
            "version": __version__,
            "description": "The node of one host: its state, its metrics, and its control.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, answer: Any, body: Any) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": {
            str(route.status): {
                "description": HTTPStatus(route.status).phrase,
                "content": {"application/json": {"schema": answer}},
            },
            "default": _PROBLEM,
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", route.path)
    ] + [
        {"name": name, "in": "query", "description": help, "schema": {"type": "string"}}
        for name, help in route.query.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    _add_role(operation, route.role)
    operation["x-kvhold-tenants"] = route.tenants.value
    return operation


def _metrics() -> dict[str, Any]:
    operation = {
        "operationId": "metrics",
        "summary": "The metrics, for Prometheus.",
        "responses": {
            "200": {
                "description": "OK",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            },
            "default": _PROBLEM,
        },
    }
    _add_role(operation, ControlRole.READ)
    return operation


def _add_role(operation: dict[str, Any], role: ControlRole) -> None:
    if role is not ControlRole.NONE:
        operation["security"] = [{"token": []}]
        operation["x-kvhold-role"] = role.name.lower()
