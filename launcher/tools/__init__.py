"""Tools: each folder is one and stands alone.

No other room imports a tool, and no tool another one, except that `export` offers the formats of
`serve`, and `rehearse` has the observer of `watch`, without which it goes. A tool can be deleted:
its verbs are then gone (`bench/without_tools.py` tries it).
"""
