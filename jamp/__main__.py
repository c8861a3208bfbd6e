"""`python -m jamp` prints what jamp finds on this machine. May import all packages."""

from jamp.diagnostics._doctor import report

print(*report(), sep="\n")
