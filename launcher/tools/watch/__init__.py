"""Watch: the observer inside a program that knows nothing of it, and the verb that starts one.

In: a command line. Out: the run folder of that program, as `report` reads it, and tables. `inside/`
is what runs in the program's own interpreter, which may be of another environment and another
version: it imports the standard library and the program's torch, and nothing else.
"""

from pathlib import Path

INSIDE = Path(__file__).parent / "inside"
"""Folder that a program's interpreter gets first on its path."""
