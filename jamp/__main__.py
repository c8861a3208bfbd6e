"""`python -m jamp`: levels, doctor, explain, cost. May import all rooms."""

from jamp.diagnostics._command import main

raise SystemExit(main())
