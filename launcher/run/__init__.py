"""One rank's run: checks before the start, the folder, the journal, saves, and how it ends.

In: a resolved config. Out: a run folder and an exit code. Knows the forecast as three questions
(forecast.py), which the doors answer; without a forecast a run does everything else the same.
"""
