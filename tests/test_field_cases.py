"""docs/field-cases.md and the marks of the tests say the same."""

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "field-cases.md"


def marked() -> dict[str, set[str]]:
    """Test files by the report that they are marked with."""
    files: dict[str, set[str]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for mark in node.decorator_list:
                    if ast.unparse(mark).startswith("pytest.mark.field_case("):
                        assert isinstance(mark, ast.Call)
                        for report in mark.args:
                            name = path.relative_to(TESTS).as_posix()
                            files[ast.literal_eval(report)].add(name)
    return files


def documented() -> list[tuple[list[str], set[str]]]:
    """(reports, test files) of every row."""
    rows = [re.split(r"(?<!\\)\|", line) for line in PAGE.read_text().splitlines() if "`" in line]
    return [
        (row[1].strip().split(", "), set(re.findall(r"`([^`]+)`", row[5])))
        for row in rows
        if len(row) == 7
    ]


def test_the_page_names_every_marked_report_once_and_its_tests() -> None:
    files, rows = marked(), documented()
    assert sorted(report for reports, _ in rows for report in reports) == sorted(files)
    for reports, named in rows:
        assert named == set().union(*(files[report] for report in reports)), reports
