"""`python -m jamp`: levels, doctor, explain. May import all rooms."""

from jamp.diagnostics._command import main

raise SystemExit(main())
