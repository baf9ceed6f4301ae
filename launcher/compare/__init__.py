"""Runs side by side: sweep/ trains the cells of a grid, report/ tells what came of any runs.

In: run folders, through the schema of `launcher/measure/records.py`. Out: tables and pages.
"""
