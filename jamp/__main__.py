"""`python -m jamp`: levels, doctor, explain, cost. May import all rooms."""

from jamp.tools._command import main

raise SystemExit(main())
