"""What stands in a browser in the place of modules that need torch."""
