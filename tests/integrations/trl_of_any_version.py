"""Lets dvp.integrations.trl take the TRL that is installed for the version it knows: `pytest -p trl_of_any_version`."""

import trl

trl.__version__ = "1.16.0"
