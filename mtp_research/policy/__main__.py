"""Entry of `python -m mtp_research.policy`: the rows that a policy runs, see `policy.trace`."""

from mtp_research.policy.trace import main

raise SystemExit(main())
