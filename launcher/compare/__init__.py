"""Runs side by side: sweep/ trains the cells of a grid, report/ compares any runs.

In: run folders, read through the schema of `launcher/measure/records.py`. Out: tables, files and
pages. inference.py is the table of `infer-bench`, which a report shows too. Trains nothing itself
(a cell is a process of its own), and knows no engine, optimizer or kernel.
"""
