"""Entry of `python -m mtp_research.policy`: the rows that a policy runs, see `policy.simulate`."""

from mtp_research.policy.simulate import trace_main

raise SystemExit(trace_main())
