"""The pages of the documentation, by their path in the repository."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        ROOT / "README.md",
        *ROOT.glob("pallas_kernels/README.md"),  # absent in `make dist`
        ROOT / "benchmarks" / "results" / "README.md",
        ROOT / "tests" / "docs" / "deviations.md",
        *sorted((ROOT / "docs").glob("*.md")),
    )
}
# Tests search tables on all pages.
SHOWN = "\n".join(PAGES.values())
