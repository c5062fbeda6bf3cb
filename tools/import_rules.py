"""The import rules as an import-linter contract: one table says which package may import which.

    lint-imports            # reads [tool.importlinter] in pyproject.toml

Unlike in import-linter's own contracts, a row may name a future package, and a package without a
row is an error. Only direct imports count, in functions and under TYPE_CHECKING, too.

From the root package, which has no row, others may take only the version. The first of
`root_packages` may import nothing from the others.
"""

import re
from typing import Any, cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

ANYTHING = "*"
_VERSION_ONLY = re.compile(r"from \w+ import __version__(\s+as \w+)?\s*(#.*)?")


class _TableField(fields.Field[dict[str, frozenset[str]]]):
    def parse(self, raw_data: Any) -> dict[str, frozenset[str]]:
        if not isinstance(raw_data, dict) or not all(
            isinstance(row, list) for row in raw_data.values()
        ):
            raise fields.ValidationError("Expected a table: package = [packages it may import].")
        table = {package: frozenset(row) for package, row in raw_data.items()}
        without_row = frozenset().union(*table.values()) - table.keys() - {ANYTHING}
        if without_row:
            raise fields.ValidationError(
                "Allowed to be imported, but without a row of their own: "
                f"{', '.join(sorted(without_row))}."
            )
        return table


class HouseContract(Contract):
    """Every package directly below the root has a row in `may_import`, and imports only packages of
    that row.
    """

    type_name = "house"

    may_import = _TableField()

    @property
    def _table(self) -> dict[str, frozenset[str]]:
        """import-linter puts the parsed value in the field's place."""
        return cast(dict[str, frozenset[str]], self.may_import)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        root = self.session_options["root_packages"][0]
        faults = [
            f"{package} has no row in the table of pyproject.toml"
            for package in sorted(_package_of(child, root) for child in graph.find_children(root))
            if package not in self._table
        ]
        for importer in sorted(graph.find_descendants(root)):
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                faults += self._faults_of_import(graph, root, importer, imported)
        return ContractCheck(kept=not faults, metadata={"faults": faults})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for fault in check.metadata["faults"]:
            output.print_error(fault, bold=False)
        output.new_line()

    def _faults_of_import(
        self, graph: ImportGraph, root: str, importer: str, imported: str
    ) -> list[str]:
        package, other = _package_of(importer, root), _package_of(imported, root)
        # report no row once, not once an import
        row = self._table.get(package, {ANYTHING})
        is_outside = imported.partition(".")[0] != root
        if not is_outside and (package == other or other in row or ANYTHING in row):
            return []
        lines = graph.get_import_details(importer=importer, imported=imported)
        if imported == root:
            lines = [
                line for line in lines if not _VERSION_ONLY.fullmatch(line["line_contents"].strip())
            ]
        wanted = imported if is_outside else other or f"the root package {root}"
        return [
            f"{package} may not import {wanted}: {importer}:{line['line_number']}: "
            f"{line['line_contents'].strip()}"
            for line in lines
        ]


def _package_of(module: str, root: str) -> str:
    """The "tiers" of "kvhold.tiers.disk"; empty for the root."""
    return module.removeprefix(root).lstrip(".").partition(".")[0]
