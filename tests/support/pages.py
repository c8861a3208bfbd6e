"""The pages of the documentation, by their path in the repository."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        ROOT / "README.md",
        *ROOT.glob("pallas_kernels/README.md"),  # which `make dist` has taken away
        ROOT / "benchmarks" / "results" / "README.md",
        ROOT / "tests" / "docs" / "deviations.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}
# For tables that are asserted, wherever they stand.
SHOWN = "\n".join(PAGES.values())
