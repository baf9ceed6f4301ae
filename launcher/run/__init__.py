"""One rank's run: capacity checks, run folder, session, journal, saves and ending.

In: a resolved config. Out: a run folder and an exit code. The forecast is a protocol of three
questions (forecast_protocol.py) that the doors fill in; without one a run does everything else the
same.
"""
