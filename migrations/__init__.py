"""The catalog's history: Alembic's environment and its versions, run by the program when it opens a catalog."""

from pathlib import Path

SCRIPT_LOCATION = Path(__file__).parent
