"""Verbs that stand apart: each folder is one, and no other room imports it."""
