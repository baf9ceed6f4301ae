"""Modules that replace, in a browser, those that need torch."""
