"""Tools around reports: what a step costs, the command line, a page, a run's history.

May import all rooms but `linen` and `nnx`. Its public names are in
`jamp.diagnostics`, which loads them when they are first used.

- `cost`: `_hlo` reads what XLA compiled.
- `python -m jamp`: `_command`; `_doctor` looks at what is installed.
- `_page`: an explanation in HTML. `_history`: numbers along a run.
"""
